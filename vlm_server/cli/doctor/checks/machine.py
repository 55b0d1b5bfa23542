"""The machine: chip, memory, system, Python."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from vlm_server.cli.doctor.finding import Finding, ok, problem, size_text, warning
from vlm_server.cli.doctor.runner import output_of
from vlm_server.cli.doctor.situation import Situation
from vlm_server.platform import machine

_LEAST_BYTES = 1 << 30
_LITTLE_BYTES = 2 << 30
_OLDEST_MACOS = 14
_OLDEST_PYTHON = (3, 11)


def look(_: Situation) -> list[Finding]:
    """One finding for each."""
    available = available_bytes(Path("/"))
    return [
        chip(platform.system(), platform.machine()),
        memory(_physical_bytes(), machine.memory_bytes(), available),
        system(platform.system(), macos_version()),
        python(sys.version_info[:3], sys.maxsize),
    ]


def chip(name: str, architecture: str) -> Finding:
    """`name` and `architecture` are those of `platform`."""
    model = _chip_name(name) or architecture
    cpus, used = os.cpu_count() or 1, machine.num_cpus()
    text = f"{model} ({architecture}), {cpus} processors" + (
        f", of which {used} may be used" if used < cpus else ""
    )
    if name == "Darwin" and architecture != "arm64":
        is_translated = (output_of(("sysctl", "-n", "sysctl.proc_translated")) or "").strip() == "1"
        advice = (
            "this Python is for Intel and runs translated: install one for arm64"
            if is_translated
            else "MLX needs Apple silicon: use a Mac with it, or Linux"
        )
        return problem("chip", text, advice)
    if (name, architecture) not in _SUPPORTED:
        return problem("chip", text, "MLX has packages for Apple silicon, Linux x86_64 and aarch64")
    return ok("chip", text)


_SUPPORTED = {("Darwin", "arm64"), ("Linux", "x86_64"), ("Linux", "aarch64")}


def memory(physical: int, allowed: int, available: int | None) -> Finding:
    """Bytes of the machine, of what control groups leave of it, and free now (None: unknown)."""
    text = size_text(physical)
    if allowed < physical:
        text += f", of which a control group allows {size_text(allowed)}"
    if available is not None:
        text += f"; {size_text(available)} free now"
    if allowed < _LEAST_BYTES:
        return problem("memory", text, "give it 1 GiB or more: the program itself needs half of it")
    if available is not None and available < _LITTLE_BYTES:
        return warning("memory", text, "end other programs before a model is loaded")
    return ok("memory", text)


def system(name: str, macos: str) -> Finding:
    """Whether MLX supports the system. `macos` is its version, empty elsewhere."""
    text = f"{_system_name(name)}, kernel {platform.release()}"
    if name == "Darwin" and macos and int(macos.partition(".")[0]) < _OLDEST_MACOS:
        return problem("system", text, f"MLX needs macOS {_OLDEST_MACOS} or newer: update it")
    return ok("system", text)


def python(version: tuple[int, ...], largest: int) -> Finding:
    """Whether this Python is new enough, and has 64 bits. `largest` is `sys.maxsize`."""
    text = f"{'.'.join(map(str, version))}, {sys.executable}"
    if version[:2] < _OLDEST_PYTHON or largest < 1 << 32:
        return problem("python", text, "install a 64-bit Python 3.11 or newer")
    return ok("python", text)


def available_bytes(root: Path) -> int | None:
    """What can be had without swapping, where the system says so (Linux)."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _chip_name(name: str) -> str:
    if name == "Darwin":
        return (output_of(("sysctl", "-n", "machdep.cpu.brand_string")) or "").strip()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def macos_version() -> str:
    """Empty elsewhere. To a Python that was built for an older one, macOS 26 says that it is 16."""
    if platform.system() != "Darwin":
        return ""
    told = (output_of(("sw_vers", "-productVersion")) or "").strip()
    return told or platform.mac_ver()[0]


def _system_name(name: str) -> str:
    if name == "Darwin":
        return f"macOS {macos_version()}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return name
