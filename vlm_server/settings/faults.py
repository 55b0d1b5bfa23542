"""Error messages about settings, with their place and the possible values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from vlm_server.nearest import nearest as closest
from vlm_server.settings.quantities import word_of

_FAULT = re.compile(r"(.*) - at `\$\.(\w+)(.*)`")
_CHOICE = "Invalid enum value"
_OTHERS = re.compile(r" \| (object|null)")
"""Types that stand for a share or a word."""

RENAMED = {
    "server.model_aliases": "model.aliases",
    "server.stream_resume_client_bytes": "server.max_stream_resume_bytes_per_key",
    "model.search_paths": "model.search_folders",
    "limits.intake_timeout_seconds": "limits.parsing_timeout_seconds",
    "watch.idle_seconds": "watch.idle_timeout_seconds",
    "image.max_request_pixels": "image.max_decoded_pixels",
    "video.max_pixels": "video.max_frame_pixels",
    "cache.disk_path": "cache.disk_folder",
    "engine.restart_backoff_max_seconds": "engine.max_restart_backoff_seconds",
    "engine.schema_follow_seconds": "engine.max_schema_cpu_seconds",
}
"""The new names of settings with a former name that `nearest` takes for another setting's."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown `name`, with the one of `names` that may be meant.

    Settings of the same section come first.
    """
    section, _, key = name.rpartition(".")
    known = [other.rpartition(".") for other in names]
    near = {other[2]: other for other in known if other[0] == section}
    far = {other[2]: other for other in known}
    close = closest(key, far, 0.99)
    close = close or closest(key, near)
    close = close or closest(key, far, 0.8)
    return f": did you mean `{''.join((far | near)[close])}`?" if close else ""


def explain(message: str, section: str, hints: Mapping[str, Any]) -> tuple[str, str]:
    """The setting that msgspec's `message` about `section` is about, and the message in our words.

    hints: the types of the section's settings.
    """
    match = _FAULT.fullmatch(message)
    if match is None:
        return section, message
    fault, name, item = match.groups()
    fault = _OTHERS.sub("", fault)
    if fault.startswith(_CHOICE):
        fault += f"; it may be {', '.join(map(str, get_args(hints[name])))}"
    elif (word := word_of(hints[name])) and not item:
        fault += f", or `{word}`"
    return f"{section}.{name}", f"`{section}.{name}{item}`: {fault[0].lower()}{fault[1:]}"


def line_of(path: Path, full: str) -> str:
    """The file, and the line in which the setting or section `full` stands, with a colon."""
    section, _, key = full.rpartition(".")
    table, current = section or full, ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if header := re.match(r"\s*\[\s*(.+?)\s*\]", line):
            current = re.sub(r"[\"']", "", header[1])
        is_setting = section and re.match(rf"\s*{re.escape(key)}\s*=", line)
        if current == table and (is_setting or not section):
            return f"{path}, line {number}: "
    return f"{path}: "
