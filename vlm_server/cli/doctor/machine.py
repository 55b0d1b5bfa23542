"""Checks of the machine, its memory, and the room on its disks."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

from huggingface_hub import constants

from vlm_server.cli.doctor.findings import Finding, ok, problem, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.platform import machine
from vlm_server.platform.private_folder import caches_folder
from vlm_server.settings import MIB, CacheSettings
from vlm_server.settings.paths import expand_home
from vlm_server.sizes import file_size, memory_size

_MIN_BYTES = 1 << 30
_LITTLE_BYTES = 2 << 30
_MODEL_BYTES = 5 * 10**9
_STATE_BYTES = 64 * MIB


def look_at_machine(_: Situation) -> list[Finding]:
    """Checks of the machine, and of its memory."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [
        this_machine(platform.system(), platform.machine()),
        memory(physical, machine.memory_bytes(), available_bytes(Path("/"))),
    ]


def this_machine(system: str, architecture: str) -> Finding:
    """System, processors and Python. `system` and `architecture` are those of `platform`."""
    cpus, used_cpus = os.cpu_count() or 1, machine.num_cpus()
    processors = f"{cpus} processors"
    if used_cpus < cpus:
        processors += f", of which {used_cpus} may be used"
    python = f"Python {platform.python_version()}, {sys.executable}"
    text = f"{platform.platform()}, {architecture}, {processors}; {python}"
    if system == "Darwin" and architecture != "arm64":
        advice = "MLX needs Apple silicon, and a Python for arm64: one for Intel is translated"
        return problem("machine", text, advice)
    return ok("machine", text)


def memory(physical_bytes: int, allowed_bytes: int, available_bytes: int | None) -> Finding:
    """Whether memory suffices: bytes in all, bytes left by control groups, bytes free if known."""
    text = memory_size(physical_bytes)
    if allowed_bytes < physical_bytes:
        text += f", of which a control group allows {memory_size(allowed_bytes)}"
    if available_bytes is not None:
        text += f"; {memory_size(available_bytes)} free now"
    if allowed_bytes < _MIN_BYTES:
        return problem("memory", text, "give it 1 GiB or more: the program itself needs half of it")
    if available_bytes is not None and available_bytes < _LITTLE_BYTES:
        return warning("memory", text, "end other programs before a model is loaded")
    return ok("memory", text)


def available_bytes(root: Path) -> int | None:
    """Memory available without swapping, in bytes, where the system reports it (Linux)."""
    try:
        told = re.search(
            r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE
        )
    except OSError:
        return None
    return int(told[1]) * 1024 if told else None


def look_at_disks(situation: Situation) -> list[Finding]:
    """Checks of room for models, state, temporary files, and the disk cache if there is one."""
    caches = caches_folder(situation.home)
    for_models = "a 4-bit model takes 3 GB and more: free some, or set HF_HOME to another disk"
    findings = [
        room("disk for models", expand_home(constants.HF_HUB_CACHE), _MODEL_BYTES, for_models),
        room("disk for state", caches, _STATE_BYTES, "make room, or set XDG_CACHE_HOME"),
        room("disk for temporary files", temporary_folder(), _STATE_BYTES, "set TMPDIR to another"),
    ]
    if situation.settings.cache.max_disk_bytes:
        findings.append(room_for_cache(situation.settings.cache, caches))
    return findings


def room_for_cache(cache: CacheSettings, caches: Path) -> Finding:
    """Whether the disk cache, in its own folder or in `caches`, has the room that it may take."""
    folder = expand_home(cache.disk_folder) if cache.disk_folder else caches / "vlm-server"
    used_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a daemon removes files meanwhile
            used_bytes += path.stat().st_size if path.is_file() else 0
    wanted_bytes = max(0, cache.max_disk_bytes - used_bytes)
    advice = (
        "free some, or set cache.max_disk_bytes or cache.disk_folder: less is stored until then"
    )
    return room("disk for caches", folder, wanted_bytes, advice)


def room(check: str, folder: Path, wanted_bytes: int, advice: str) -> Finding:
    """Whether `folder`, which need not exist yet, can be written to and has `wanted_bytes` free."""
    around = (path for path in (folder, *folder.parents) if os.path.isdir(path))
    existing_folder = next(around, Path("/"))
    free_bytes, inodes = free_in(existing_folder)
    text = f"{folder}, {file_size(free_bytes)} free"
    if not os.access(existing_folder, os.W_OK | os.X_OK):
        return warning(check, f"{text}; it can't be written to", advice)
    if inodes == 0:
        return problem(check, f"{text}, but no file more fits (inodes)", "delete files there")
    if free_bytes < min(wanted_bytes, _STATE_BYTES):
        return problem(check, f"{text}: it is full", advice)
    if free_bytes < wanted_bytes:
        return warning(check, f"{text}, less than {file_size(wanted_bytes)}", advice)
    return ok(check, text)


def temporary_folder() -> Path:
    """The folder of temporary files; the root if there is none."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/")


def free_in(folder: Path) -> tuple[int, int | None]:
    """The bytes and files that may be written; None where a file system does not count files."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None
