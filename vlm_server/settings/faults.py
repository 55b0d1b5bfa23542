"""Error messages about settings, with their place and the possible values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from vlm_server.nearest import did_you_mean
from vlm_server.nearest import nearest as closest
from vlm_server.settings.quantities import bare, is_list, shown, word_of

_FAULT = re.compile(r"(.*) - at `\$\.\w+(.*)`")
_CHOICE = "Invalid enum value"
_EXPECTED = re.compile(r"Expected `(.+?)`(?: ([<>]=?) (\S+))?(?:, got `(\w+)`)?")
_KINDS = {"int": "a whole number", "float": "a number", "str": "a text", "array": "a list"}
_KINDS |= {"bool": "true or false"}
_SIGNS = {"<=": "of at most", ">=": "of at least", "<": "below", ">": "above"}
_POSITION = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)
_CAUSES = {
    "Invalid value": "a text needs quotes; true and false are in small letters",
    "Expected newline or end of document after a statement": "a text needs quotes",
    "Illegal character '\\n'": "a quote is not closed",
    "Cannot overwrite": "this name is there twice",
    "Cannot declare": "this section is there twice",
}
_MAX_REPEATED_CHARS, _MAX_REPEATED = 40, 1 << 63
_HEADER = re.compile(r"\s*\[+\s*(.+?)\s*\]")
_SETTING = re.compile(r"\s*([^=#\[\s][^=#]*?)\s*=")

COMMAND_LINE = "command line"
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


def explain(message: str, full: str, hint: Any, value: Any) -> str:
    """msgspec's `message` about a setting's `value`, which is not of the type `hint`, in our words.

    The value is repeated if it is a text or a number, short, and no list: API keys are one.
    """
    match = _FAULT.fullmatch(message)
    if match is None:
        return f"`{full}`: {message}"
    fault, item = match.groups()
    is_known = isinstance(value, str | float) or (type(value) is int and abs(value) < _MAX_REPEATED)
    repeated = repr(value) if is_known and not is_list(hint) else ""
    repeated = repeated if len(repeated) <= _MAX_REPEATED_CHARS else ""
    if get_origin(bare(hint)) is Literal:
        choices = list(map(str, get_args(bare(hint))))
        given = fault.removeprefix(_CHOICE).strip(" '")
        text = f"it may be {', '.join(choices[:-1])} or {choices[-1]}"
        text += f", not {repeated}" if repeated else ""
        text += did_you_mean(given, choices)
    elif expected := _EXPECTED.fullmatch(fault):
        text = _expectation(full, hint if not item else str, repeated, *expected.groups())
    else:
        text = f"{fault[0].lower()}{fault[1:]}"
    return f"`{full}{item}`: {text}"


def _expectation(
    full: str, hint: Any, value: str, kinds: str, sign: str, bound: str, given: str
) -> str:
    kind = next(kind for kind in kinds.split(" | ") if kind in _KINDS)
    text = f"it has to be {_KINDS[kind]}"
    if sign:
        number = float(bound)
        limit = shown(full.rpartition(".")[2], int(number) if number.is_integer() else number, None)
        text += f" {_SIGNS[sign]} {limit}"
    if word := word_of(hint):
        text += f", or `{word}`"
    if given:
        return f"{text}, not {_KINDS.get(given, given)}{value and f' ({value})'}"
    return f"{text}, not {value}" if value else text


def explain_toml(path: Path, message: str) -> str:
    """tomllib's `message` about the file, with its line and what is probably wrong."""
    match = _POSITION.fullmatch(message)
    if match is None:
        return f"{path} is not valid TOML: {message}"
    text, line, column = match.groups()
    cause = next((cause for start, cause in _CAUSES.items() if text.startswith(start)), "")
    return f"{path}, line {line}: not valid TOML at column {column}: {cause or text}"


@dataclass(frozen=True, slots=True)
class Places:
    """Where settings were given."""

    file: Path | None
    lines: Mapping[str, int]
    """The line of `file` in which each section and setting begins, by name."""
    sources: dict[str, str]
    """`file`, the variable, or `COMMAND_LINE`, by `section.key`."""

    def line_of(self, full: str) -> int:
        """The line of a setting, or of its section if it is missing; 0 if neither is there."""
        return self.lines.get(full) or self.lines.get(full.rpartition(".")[0], 0)

    def of(self, full: str) -> str:
        """The place of the setting or section, with a colon; empty for the command line, which is
        short."""
        names = [name for name in self.sources if f"{name}.".startswith(f"{full}.")]
        if names and (source := self.sources[names[0]]) != str(self.file):
            return "" if source == COMMAND_LINE else f"{source}: "
        if line := self.line_of(full):
            return f"{self.file}, line {line}: "
        return f"{self.file}: " if names else ""


def lines_of(text: str) -> dict[str, int]:
    """The line in which each section and setting of a file's text begins, by name."""
    lines = dict[str, int]()
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        header, setting = _HEADER.match(line), _SETTING.match(line)
        if header:
            name = section = re.sub(r"[\"']", "", header[1])
        elif setting:
            name = ".".join(filter(None, (section, re.sub(r"[\"']", "", setting[1]))))
        else:
            continue
        while name:
            lines.setdefault(name, number)
            name = name.rpartition(".")[0]
    return lines
