"""Sizes for people: memory in GiB, as settings and systems count it, files in GB, as hubs do."""

from __future__ import annotations


def memory_size(num_bytes: float) -> str:
    """A size of memory, or of a limit that a setting has in GiB: `512 MiB`, `23.5 GiB`."""
    return _text(num_bytes, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))


def file_size(num_bytes: float) -> str:
    """A size of files, downloads and room on disks: `15 MB`, `3.11 GB`."""
    return _text(num_bytes, 1000, ("bytes", "kB", "MB", "GB", "TB"))


def _text(number: float, base: int, units: tuple[str, ...]) -> str:
    """Whole numbers of small units, and three digits of the large ones."""
    power = 0
    while abs(number) >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power < 3 else max(0, 3 - len(f"{number:.0f}"))
    return f"{number:.{digits}f} {units[power]}"
