"""Room on the disks that are written to, and whether they can be."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from huggingface_hub import constants

from vlm_server.cli.doctor.finding import Finding, ok, problem, size_text, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.platform.private_folder import caches_folder
from vlm_server.settings import MIB
from vlm_server.settings.paths import expanded

_MODEL_BYTES = 5 << 30
_STATE_BYTES = 64 * MIB


def look(situation: Situation) -> list[Finding]:
    """Models, the state folder, temporary files, and the disk cache if there is one."""
    caches = caches_folder(situation.home)
    cache = situation.settings.cache
    findings = [
        models(expanded(constants.HF_HUB_CACHE)),
        room("disk for state", caches, _STATE_BYTES, "make room, or set XDG_CACHE_HOME"),
        room("disk for temporary files", temporary_folder(), _STATE_BYTES, "set TMPDIR to another"),
    ]
    if cache.disk_bytes:
        folder = expanded(cache.disk_path) if cache.disk_path else caches / "vlm-server"
        wanted = max(0, cache.disk_bytes - _size(folder))
        advice = "free some, or set cache.disk_bytes or cache.disk_path: less is stored until then"
        findings.append(room("disk for caches", folder, wanted, advice))
    return findings


def models(folder: Path) -> Finding:
    """Where downloads go. That it is full is no fault until something is downloaded."""
    advice = "a 4-bit model takes 3 GB and more: free some, or set HF_HOME to another disk"
    return room("disk for models", folder, _MODEL_BYTES, advice)


def room(check: str, folder: Path, wanted: int, advice: str) -> Finding:
    """Whether `folder`, which need not exist yet, can be written to and has `wanted` bytes free."""
    there = nearest(folder)
    free, inodes = free_in(there)
    text = f"{folder}, {size_text(free)} free"
    if not os.access(there, os.W_OK | os.X_OK):
        return warning(check, f"{text}; it can't be written to", advice)
    if inodes == 0:
        return problem(check, f"{text}, but no file more fits (inodes)", "delete files there")
    if free < min(wanted, _STATE_BYTES):
        return problem(check, f"{text}: it is full", advice)
    if free < wanted:
        return warning(check, f"{text}, less than {size_text(wanted)}", advice)
    return ok(check, text)


def temporary_folder() -> Path:
    """Where temporary files go; the root if there is no folder that takes them."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/")


def nearest(folder: Path) -> Path:
    """`folder`, or the innermost of those around it that is there."""
    for each in (folder, *folder.parents):
        if os.path.isdir(each):
            return each
    return Path("/")


def free_in(folder: Path) -> tuple[int, int | None]:
    """Bytes and files that may be written; None where a file system does not count files."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
