"""Finds the fields of a request that have no effect, to report them."""

from __future__ import annotations

import re
from typing import Any

from vlm_server.api.responses.items import (
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    InputText,
    InputVideo,
    MessageItem,
    OutputText,
    Reasoning,
    Refusal,
)

MAX_REPORTED = 32
_SHOWN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_EMPTY: tuple[Any, ...] = (None, "", [], {}, False)
_OBEYED = {
    struct.__struct_config__.tag: frozenset({"type", *struct.__struct_encode_fields__})
    for struct in (
        *(FunctionCall, FunctionCallOutput, MessageItem, Reasoning),
        *(InputImage, InputText, InputVideo, OutputText, Refusal),
    )
}
_SAID_ANYWAY = {"message": {"phase"}, "reasoning": {"summary"}, "output_text": {"annotations"}}
"""Fields that are kept for who asks for an item, and have no effect."""
_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
_CHOICES = {"function": {"type", "name"}, "allowed_tools": {"type", "mode", "tools"}}
_FORMATS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "name", "schema", "strict", "description"},
}
_PARTS_OF = ("content", "output")


class Ignored:
    """Collects their names: paths without indexes, each once, at most `MAX_REPORTED` of them.

    Values that say nothing, such as null, are not worth a word.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def add(self, name: str, value: Any) -> None:
        """`value` of the field `name` has no effect."""
        if value not in _EMPTY and len(self._names) < MAX_REPORTED:
            self._names[name] = None

    def look_into(self, fields: dict[str, Any]) -> None:
        """What has no effect in the fields of a valid request."""
        for item in _dicts(fields.get("input")):
            self._rest(item, *_of_type(item), "input[]")
            for name in _PARTS_OF:
                for part in _dicts(item.get(name)):
                    self._rest(part, *_of_type(part), f"input[].{name}[]")
        for tool in _dicts(fields.get("tools")):
            self._rest(tool, _TOOL, set(), "tools[]")
        self._settings(fields)

    def _settings(self, fields: dict[str, Any]) -> None:
        choice, text = fields.get("tool_choice"), fields.get("text") or {}
        if isinstance(choice, dict):
            self._rest(choice, _CHOICES[choice["type"]], set(), "tool_choice")
        self._rest(text, {"format"}, set(), "text")
        if wanted := text.get("format"):
            self._rest(wanted, _FORMATS[wanted["type"]], set(), "text.format")
        self._rest(fields.get("reasoning") or {}, {"effort", "max_tokens"}, set(), "reasoning")
        self._rest(fields.get("thinking") or {}, {"type", "budget_tokens"}, set(), "thinking")
        self._rest(fields.get("stream_options") or {}, set(), set(), "stream_options")
        for each in fields.get("include") or ():
            if each != "message.output_text.logprobs":
                self.add(f"include.{each}", each)

    def _rest(
        self,
        value: dict[str, Any],
        obeyed: frozenset[str] | set[str],
        without_effect: set[str],
        path: str,
    ) -> None:
        for name in value.keys() - (obeyed - without_effect):
            shown = name if _SHOWN.fullmatch(name) else "?"
            self.add(f"{path}.{shown}", value[name])


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _of_type(value: dict[str, Any]) -> tuple[frozenset[str], set[str]]:
    """The fields that something of its type has, and those of them without effect."""
    kind = str(value.get("type"))
    return _OBEYED.get(kind, frozenset(value)), _SAID_ANYWAY.get(kind, set())
