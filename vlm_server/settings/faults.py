"""Error messages about settings, with the line of the file and the possible values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `\$\.(\w+)`)?")
_WRONG = re.compile(r"(.*) - at `\$\.(\w+)\.(\w+)`")
_CHOICE = "Invalid enum value"


def explain(
    message: str, tree: type[msgspec.Struct], path: Path | None, sources: Mapping[str, str]
) -> str:
    """msgspec's `message` about settings of the shape `tree`, in words of ours.

    It names the line of the file at `path`, if `sources` say that the setting comes from there.
    """
    if (match := _UNKNOWN.fullmatch(message)) is not None:
        name, section = match[1], match[2] or ""
        full = f"{section}.{name}" if section else name
        struct = tree if not section else _type_of(tree, section)
        return (
            f"{location_of(path, full, sources)}there is no setting `{full}`{_close(full, struct)}"
        )
    if (match := _WRONG.fullmatch(message)) is not None:
        full, fault = f"{match[2]}.{match[3]}", match[1]
        if fault.startswith(_CHOICE):
            hint = get_type_hints(_type_of(tree, match[2]))[match[3]]
            fault += f"; it may be {', '.join(map(str, get_args(hint)))}"
        return f"{location_of(path, full, sources)}`{full}`: {fault[0].lower()}{fault[1:]}"
    return message.replace("`$.", "`")


def _type_of(tree: type[msgspec.Struct], section: str) -> Any:
    return get_type_hints(tree).get(section)


def _close(full: str, struct: Any) -> str:
    """Which setting of `struct` may be meant by `full`."""
    section, dot, name = full.rpartition(".")
    try:
        names = [field.name for field in msgspec.structs.fields(struct)]
    except TypeError:  # no table of ours
        return ""
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean `{section}{dot}{close[0]}`?" if close else ""


def location_of(path: Path | None, full: str, sources: Mapping[str, str]) -> str:
    """The file and the line in which the setting or section stands; empty if it is in none."""
    section, _, key = full.rpartition(".")
    in_file = [source for source in sources if source == full or source.startswith(f"{full}.")]
    if path is None or not in_file or sources[in_file[0]] != str(path):
        return ""
    table, current = section or full, ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            current = header[1]
        is_setting = section and re.match(rf"\s*{re.escape(key)}\s*=", line)
        if current == table and (is_setting or not section):
            return f"{path}, line {number}: "
    return f"{path}: "
