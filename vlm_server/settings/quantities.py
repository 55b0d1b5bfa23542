"""Values of settings as people write them: `30 GiB`, `1h30m`, `50 MP`, `75%`, `auto`."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

MIB, GIB = 1 << 20, 1 << 30
MIN_KEY_CHARS = 8
MAX_FLOAT = 1e9
MAX_INT = 1 << 53
"""The bounds of any number: far above what makes sense, and below what overflows."""


_ABSOLUTE = "absolute"
AbsolutePath = Annotated[str, _ABSOLUTE]
"""The absolute path of a file or folder, which may begin with `~`; empty for none."""


class Word(msgspec.Struct, frozen=True):
    """The word for a setting's empty value, which is None, or no text at all: `auto`, `off`."""

    text: str


AUTO, OFF = "auto", "off"
Auto, Off = Word(AUTO), Word(OFF)

_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})"
_SIZE = re.compile(rf"{_NUMBER} ?([kmgt]?i?b)", re.IGNORECASE)
_TIME_PART = re.compile(rf"{_NUMBER} ?(ns|us|µs|ms|s|min|m|h|d) ?")
_PIXELS = re.compile(rf"{_NUMBER} ?(px|pixels?|mp|megapixels?)", re.IGNORECASE)
_SHARE = re.compile(rf"{_NUMBER} ?%")
_UNIT = re.compile(r"(?:.*_)?(bytes|seconds|pixels|tokens|dpi|fps)(?:_per_key)?")
_SIZES: dict[str, int] = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}
_TIMES |= {"h": 3600.0, "d": 86400.0}
_SHOWN_SIZES = (
    (1 << 40, "TiB"), (10**12, "TB"), (1 << 30, "GiB"), (10**9, "GB"),
    (1 << 20, "MiB"), (10**6, "MB"), (1 << 10, "KiB"),
)  # fmt: skip
_SHOWN_TIMES = (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3))


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size as a part of another; which one, the setting says."""

    percent: float
    """Above 0, at most 100."""

    def of(self, size_bytes: int) -> int:
        return int(size_bytes * self.percent / 100)

    def __str__(self) -> str:
        return f"{self.percent:g}%"


def unit_of(name: str) -> str:
    """The unit of a plain number, with which the name of its setting ends; empty for none."""
    match = _UNIT.fullmatch(name)
    return match[1] if match else ""


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


def pixels(text: str) -> int:
    """The pixels of `12 MP` (millions) or `512px`. Raises ValueError."""
    match = _PIXELS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size, as 12MP, 512px, or a number of pixels")
    return round(float(match[1]) * (1e6 if match[2].lower().startswith("m") else 1))


def _counted(unit: str) -> Callable[[str], float]:
    """The reader of numbers with `unit`, which has no multiples."""
    pattern = re.compile(rf"{_NUMBER} ?{unit}", re.IGNORECASE)

    def read(text: str) -> float:
        if (match := pattern.fullmatch(text.strip())) is None:
            raise ValueError(f"{text!r} is no number of {unit}")
        number = float(match[1])
        return int(number) if number.is_integer() else number

    return read


_READERS: dict[str, Callable[[str], float]] = {"bytes": size_bytes, "seconds": seconds}
_READERS |= {"pixels": pixels} | {unit: _counted(unit) for unit in ("tokens", "dpi", "fps")}


def value_of(name: str, text: str, kind: Any) -> Any:
    """The value of the setting `name`, of the type `kind`, that is given as `text`.

    What has no unit stays text. Raises ValueError.
    """
    if not (unit := unit_of(name)):
        return text
    if unit != "bytes" or (share := _SHARE.fullmatch(text.strip())) is None:
        return _READERS[unit](text)
    if not is_share(kind):
        raise ValueError(f"it has to be a size, as 30GiB or 512MB, not a share ({text})")
    if not 0 < (percent := float(share[1])) <= 100:
        raise ValueError(f"it has to be above 0% and at most 100%, not {text}")
    return {"percent": percent}


def word_of(hint: Any) -> str:
    """The word for the empty value of a setting of the type `hint`; empty if it has none."""
    metadata = getattr(hint, "__metadata__", ())
    return next((each.text for each in metadata if isinstance(each, Word)), "")


def bare(hint: Any) -> Any:
    """The type of a setting without its word and bounds."""
    return hint.__origin__ if hasattr(hint, "__metadata__") else hint


def is_list(hint: Any) -> bool:
    """Whether a setting of the type `hint` is a list."""
    return get_origin(bare(hint)) is tuple


def is_text(hint: Any) -> bool:
    """Whether a setting of the type `hint` is a text, whatever it looks like."""
    choices = choices_of(hint)
    return bare(hint) is str or (bool(choices) and all(isinstance(each, str) for each in choices))


def choices_of(hint: Any) -> tuple[Any, ...]:
    """All values of a setting of the type `hint`, if it has few; else none."""
    kind = bare(hint)
    if kind is bool:
        return True, False
    return get_args(kind) if get_origin(kind) is Literal else ()


def is_share(hint: Any) -> bool:
    """Whether a setting of the type `hint` may be a part of another size, as `75%`."""
    return Share in get_args(bare(hint))


def empty_of(hint: Any) -> Any:
    """The value that the word of a setting of the type `hint` stands for."""
    kind = bare(hint)
    if NoneType in get_args(kind):
        return None
    return "" if kind is str else ()


def is_absolute_path(hint: Any) -> bool:
    """Whether a setting of the type `hint` is an absolute path, or has several."""
    return _ABSOLUTE in getattr(hint, "__metadata__", ()) or AbsolutePath in get_args(hint)


def with_word(value: Any, hint: Any) -> Any:
    """`value`, or the word for it if it is the empty one of a setting of the type `hint`."""
    if (word := word_of(hint)) and value in (None, "", ()):
        return word
    return str(value) if isinstance(value, Share) else value


def shown(name: str, value: Any, hint: Any) -> Any:
    """`value` of the setting `name`, as a settings file may have it, if possible with its unit."""
    value = with_word(value, hint)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value:
        return value
    return _SHOWN.get(unit_of(name), lambda number: number)(value)


def _shown_bytes(number: int) -> str | int:
    for size, name in _SHOWN_SIZES:
        if not number % size:
            return f"{number // size} {name}"
    return number


def _shown_seconds(number: float) -> str | float:
    for name, size in _SHOWN_TIMES:
        count = number / size
        if count >= 1 and count == round(count, 1):
            return f"{count:.12g} {name}"
    return number


def _shown_pixels(number: int) -> str:
    """In millions only if few digits say them exactly."""
    is_round = number >= 1_000_000 and not number % 1000
    return f"{number / 1e6:.12g} MP" if is_round else f"{number} px"


_SHOWN: dict[str, Callable[[Any], Any]] = {
    "bytes": _shown_bytes,
    "seconds": _shown_seconds,
    "pixels": _shown_pixels,
}
