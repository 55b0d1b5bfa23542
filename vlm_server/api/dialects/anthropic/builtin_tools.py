"""Anthropic's tool types that clients run, as ordinary tools.

Anthropic's models know their arguments; other models get descriptions with the screen's size.
"""

from __future__ import annotations

import re
from typing import Any

from vlm_server.api.dialects.anthropic.schema import Tool
from vlm_server.api.parsing.tools import ToolDefinition
from vlm_server.errors import InvalidRequest, UnsupportedField

_FIRST_ACTIONS = (
    "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click",
    "double_click", "screenshot", "cursor_position",
)  # fmt: skip
_LATER_ACTIONS = (
    "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click",
)  # fmt: skip
_TYPE = re.compile(r"(computer|bash|text_editor)_([0-9]{8})")
_COMPUTER_SINCE_SCROLL = "20250124"
_COMPUTER_SINCE_ZOOM = "20251124"
_EDITOR_WITHOUT_UNDO = "20250429"


_OF_KIND = {
    "computer": ("display_width_px", "display_height_px", "enable_zoom"),
    "bash": (),
    "text_editor": ("max_characters",),
}
FIELDS_OF_BUILTIN = tuple(name for names in _OF_KIND.values() for name in names)
"""Fields of these tool types only."""


def fields_without_effect(tool: Tool) -> tuple[str, ...]:
    """The fields without effect in a tool of this type."""
    match = _TYPE.fullmatch(tool.type or "")
    own_fields = _OF_KIND[match[1]] if match else ()
    other_fields = tuple(name for name in FIELDS_OF_BUILTIN if name not in own_fields)
    return ("description", "input_schema", *other_fields)


def builtin_tool(tool: Tool, param: str) -> ToolDefinition:
    """A tool of one of Anthropic's types as an ordinary one. Raises InvalidRequest."""
    match = _TYPE.fullmatch(tool.type or "")
    if match is None:
        raise UnsupportedField(
            f"`{param}.type`: tools that Anthropic's servers carry out are not supported; "
            "`computer_*`, `bash_*` and `text_editor_*` are.",
            f"{param}.type",
        )
    kind, version = match.groups()
    make = {"computer": _computer, "bash": _bash, "text_editor": _text_editor}[kind]
    description, parameters = make(tool, version, param)
    return ToolDefinition(tool.name, param, description, parameters, bool(tool.strict))


_Made = tuple[str, dict[str, Any]]


def _computer(tool: Tool, version: str, param: str) -> _Made:
    width, height = tool.display_width_px, tool.display_height_px
    if width is None or height is None:
        name = "display_width_px" if width is None else "display_height_px"
        raise InvalidRequest(f"`{param}.{name}` is missing.", f"{param}.{name}")
    description = (
        f"Uses a computer's screen, mouse and keyboard. The screen is {width} pixels wide and "
        f"{height} pixels high; coordinates are [x, y] in pixels from its top left corner. "
        "Look at a screenshot before you click, and click the middle of what you mean."
    )
    actions = [*_FIRST_ACTIONS]
    properties: dict[str, Any] = {
        "action": {"type": "string", "enum": actions, "description": "What to do."},
        "coordinate": _numbers(2, "Where: for mouse actions."),
        "text": {
            "type": "string",
            "description": "What to type, or the keys to press, such as `ctrl+s`.",
        },
    }
    if version >= _COMPUTER_SINCE_SCROLL:
        actions += _LATER_ACTIONS
        properties |= {
            "start_coordinate": _numbers(2, "Where a drag begins."),
            "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
            "scroll_amount": {"type": "integer", "minimum": 0, "description": "Clicks to scroll."},
            "duration": {"type": "number", "description": "Seconds to wait or to hold a key."},
        }
    if version >= _COMPUTER_SINCE_ZOOM and tool.enable_zoom:
        actions.append("zoom")
        properties["region"] = _numbers(4, "What to zoom in on: [x1, y1, x2, y2] in pixels.")
    return description, _object(properties, "action")


def _bash(tool: Tool, version: str, param: str) -> _Made:
    properties = {
        "command": {"type": "string", "description": "The command to run."},
        "restart": {"type": "boolean", "description": "Start the shell anew instead."},
    }
    description = "Runs commands in a shell that keeps its state from one call to the next."
    return description, _object(properties)


def _text_editor(tool: Tool, version: str, param: str) -> _Made:
    commands = ["view", "create", "str_replace", "insert"]
    inserted = "insert_text"
    if version < _EDITOR_WITHOUT_UNDO:
        commands.append("undo_edit")
        inserted = "new_str"
    properties: dict[str, Any] = {
        "command": {"type": "string", "enum": commands},
        "path": {"type": "string", "description": "The absolute path of a file or folder."},
        "view_range": _numbers(2, "For view: the first and last line; -1 is the file's last."),
        "file_text": {"type": "string", "description": "For create: the file's content."},
        "old_str": {"type": "string", "description": "For str_replace: text that occurs once."},
        "new_str": {"type": "string", "description": "What to put in its place."},
        "insert_line": {"type": "integer", "description": "For insert: the line to insert after."},
    }
    if inserted == "insert_text":
        properties["insert_text"] = {"type": "string", "description": "For insert: the text."}
    description = f"Views and edits text files. `insert` takes its text from `{inserted}`."
    if tool.max_characters is not None:
        description += f" `view` shows {tool.max_characters} characters at most."
    return description, _object(properties, "command", "path")


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _numbers(count: int, description: str) -> dict[str, Any]:
    return {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": count,
        "maxItems": count,
        "description": description,
    }
