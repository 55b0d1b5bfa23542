"""Builds sdist and wheel, and looks into them."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

WARNING = re.compile(r"warning|deprecat|\*{8}", re.IGNORECASE)
HARMLESS = ("byte-compiling is disabled", "errors.py", "shallow")


class CheckFailed(Exception):
    """What is built can't be released."""


def build(root: Path, out: Path) -> Path:
    """The wheel, built from the sdist, after a look into it. Raises CheckFailed."""
    out.mkdir(parents=True, exist_ok=True)
    _build(root, out)
    wheel = max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    check_files(root, wheel)
    check_metadata(wheel)
    _run("twine", "check", "--strict", *map(str, packages(out)))
    print(f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def packages(out: Path) -> list[Path]:
    """The files to upload."""
    return sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])


def check_reproducible(root: Path, out: Path, folder: Path) -> None:
    """Another build, from another clone, has the same bytes. Raises CheckFailed."""
    folder.mkdir()
    _build(root, folder, umask=0o077)
    for path in packages(folder):
        first, second = (hashlib.sha256((at / path.name).read_bytes()) for at in (out, folder))
        if first.hexdigest() != second.hexdigest():
            raise CheckFailed(f"{path.name} has other bytes when it is built again")
        print(f"built again with the same bytes: {path.name} {first.hexdigest()}")


def _build(root: Path, out: Path, umask: int = 0o022) -> None:
    said = _run("build", "--outdir", str(out), str(root), umask=umask)
    for line in said.splitlines():
        if WARNING.search(line) and not any(word in line for word in HARMLESS):
            raise CheckFailed(f"the build warns: {line}")


def _run(module: str, *words: str, umask: int = 0o022) -> str:
    """What a module of ours said. Raises CheckFailed if it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, umask=umask
    )
    said = ended.stdout + ended.stderr
    if ended.returncode:
        raise CheckFailed(f"{module} failed:\n{said[-4000:]}")
    return said


def check_files(root: Path, wheel: Path) -> None:
    """All that git has of the package is in the wheel, and nothing else. Raises CheckFailed."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "vlm_server"], capture_output=True, text=True
    )
    wanted = set(listed.stdout.split())
    with zipfile.ZipFile(wheel) as archive:
        found = {
            name for name in archive.namelist() if not re.match(r"[^/]+\.(dist-info|data)/", name)
        }
        flawed = archive.testzip()
    if flawed:
        raise CheckFailed(f"{flawed} in the wheel is broken")
    if missing := wanted - found:
        raise CheckFailed(f"not in the wheel: {', '.join(sorted(missing))}")
    if surplus := found - wanted:
        raise CheckFailed(f"in the wheel, but not in git: {', '.join(sorted(surplus))}")


def check_metadata(wheel: Path) -> None:
    """The fields that an index shows. Raises CheckFailed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    text = metadata.get_payload(decode=True).decode()
    wanted = {
        "Name": "vlm-server",
        "Version": wheel.name.split("-")[1],
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
    }
    for field, value in wanted.items():
        given = metadata.get_all(field, [])
        if value not in given:
            raise CheckFailed(f"{field} is {given}, without {value!r}")
    if not text.startswith("# vlm_server"):
        raise CheckFailed("the README is not in the metadata")
    if not any(url.startswith("Repository, ") for url in metadata.get_all("Project-URL", [])):
        raise CheckFailed("the metadata has no URLs")
    if relative := re.search(r"\]\((?!\w+:|#)[^)\s]+\)", text):
        raise CheckFailed(f"a link of the README is relative: {relative[0]}")
