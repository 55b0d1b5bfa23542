"""Bounds of settings; sizes, times and shares as people write them: `30GiB`, `1h30m`, `75%`."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

import msgspec

MIB, GIB = 1 << 20, 1 << 30
MIN_KEY_CHARS = 8
MAX_FLOAT = 1e9
MAX_INT = 1 << 53
"""The bounds of any number: far above what makes sense, and below what overflows."""


AbsolutePath = Annotated[str, "absolute"]
"""The absolute path of a file or folder, which may begin with `~`; empty for none."""


_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})"
_SIZE = re.compile(rf"{_NUMBER} ?([kmgt]?i?b)", re.IGNORECASE)
_TIME_PART = re.compile(rf"{_NUMBER} ?(ns|us|µs|ms|s|min|m|h|d) ?")
_SHARE = re.compile(rf"{_NUMBER} ?%")
_SIZES: dict[str, int] = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}
_TIMES |= {"h": 3600.0, "d": 86400.0}


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size as a part of another; which one, the setting says."""

    percent: float
    """Above 0, at most 100."""

    def of(self, size_bytes: int) -> int:
        return int(size_bytes * self.percent / 100)

    def __str__(self) -> str:
        return f"{self.percent:g}%"


def size_bytes(text: str) -> int:
    """Bytes of `512MB` (of 1000) or `30GiB` (of 1024), in any case. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _SIZES:
        raise ValueError(f"{text!r} is no size, as 30GiB, 512MB, or a number of bytes")
    return round(float(match[1]) * _SIZES[match[2].lower()])


def seconds(text: str) -> float:
    """The seconds of `90s`, `5m`, `1h30m`. Raises ValueError."""
    parts = _TIME_PART.findall(text)
    if not parts or _TIME_PART.sub("", text).strip():
        raise ValueError(f"{text!r} is no time, as 90s, 5m, 1h30m, or a number of seconds")
    return float(sum(float(number) * _TIMES[unit] for number, unit in parts))


def seconds_or_number(text: str) -> float:
    """The seconds of a command line option, which may have no unit. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        return seconds(text)


def value_of(name: str, text: str, kind: Any) -> Any:
    """The value of the setting `name`, of the type `kind`, that is given as `text`.

    What is neither a size nor a time stays text. Raises ValueError.
    """
    if name.endswith("_seconds"):
        return seconds(text)
    if not name.endswith("_bytes"):
        return text
    if (share := _SHARE.fullmatch(text.strip())) is None:
        return size_bytes(text)
    if Share not in get_args(kind):
        raise ValueError(f"it has to be a size, as 30GiB or 512MB, not a share ({text})")
    if not 0 < (percent := float(share[1])) <= 100:
        raise ValueError(f"it has to be above 0% and at most 100%, not {text}")
    return {"percent": percent}
