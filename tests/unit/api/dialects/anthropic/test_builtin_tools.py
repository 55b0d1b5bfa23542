"""Anthropic's built-in tool types become ordinary function tools in the prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.unit.api.dialects.anthropic.steps import ROUTE, request
from tests.unit.api.scripted_engine import ScriptedEngine

SCREEN = {"name": "computer", "display_width_px": 1024, "display_height_px": 768}


@pytest.fixture
def definition_of(client: httpx.AsyncClient, engine: ScriptedEngine) -> Any:
    async def tell(**tool: Any) -> dict[str, Any]:
        """The function definition in the prompt for `tool`."""
        answer = await client.post(ROUTE, json=request(tools=[tool]))
        assert answer.status_code == 200, answer.text
        tools = engine.submitted[-1].tools
        assert tools is not None
        (definition,) = json.loads(tools.definitions)
        function: dict[str, Any] = definition["function"]
        jsonschema.Draft202012Validator.check_schema(function["parameters"])
        return function

    return tell


@pytest.mark.parametrize(
    ("kind", "has_scroll", "has_zoom"),
    [
        ("computer_20241022", False, False),
        ("computer_20250124", True, False),
        ("computer_20251124", True, True),
    ],
)
async def test_computer_tool_offers_actions_of_its_version(
    definition_of: Any, kind: str, has_scroll: bool, has_zoom: bool
) -> None:
    function = await definition_of(type=kind, display_number=1, enable_zoom=True, **SCREEN)
    assert function["name"] == "computer"
    assert "1024 pixels wide and 768 pixels high" in function["description"]
    parameters = function["parameters"]
    actions = parameters["properties"]["action"]["enum"]
    assert "left_click" in actions
    assert ("scroll" in actions, "scroll_direction" in parameters["properties"]) == (
        has_scroll,
    ) * 2
    assert ("zoom" in actions, "region" in parameters["properties"]) == (has_zoom,) * 2
    jsonschema.validate({"action": "left_click", "coordinate": [10, 20]}, parameters)
    jsonschema.validate({"action": "type", "text": "hi"}, parameters)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"action": "left_click", "coordinate": [10]}, parameters)


async def test_computer_tool_offers_zoom_only_if_enabled(definition_of: Any) -> None:
    function = await definition_of(type="computer_20251124", **SCREEN)
    assert "zoom" not in function["parameters"]["properties"]["action"]["enum"]


async def test_computer_tool_needs_its_screen_size(client: httpx.AsyncClient) -> None:
    tool = {"type": "computer_20250124", "name": "computer", "display_width_px": 10}
    answer = await client.post(ROUTE, json=request(tools=[tool]))
    assert answer.json()["error"]["param"] == "tools[0].display_height_px"


async def test_bash_tool_offers_command_and_restart(definition_of: Any) -> None:
    function = await definition_of(type="bash_20250124", name="bash")
    assert list(function["parameters"]["properties"]) == ["command", "restart"]


@pytest.mark.parametrize(
    ("kind", "name", "inserts", "undoes"),
    [
        ("text_editor_20241022", "str_replace_editor", "new_str", True),
        ("text_editor_20250124", "str_replace_editor", "new_str", True),
        ("text_editor_20250429", "str_replace_based_edit_tool", "insert_text", False),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_text", False),
    ],
)
async def test_text_editor_offers_commands_of_its_version(
    definition_of: Any, kind: str, name: str, inserts: str, undoes: bool
) -> None:
    function = await definition_of(type=kind, name=name)
    assert function["name"] == name
    assert f"`{inserts}`" in function["description"]
    properties = function["parameters"]["properties"]
    assert ("undo_edit" in properties["command"]["enum"]) == undoes
    jsonschema.validate(
        {"command": "insert", "path": "/a", "insert_line": 1, inserts: "b"}, function["parameters"]
    )
    assert inserts in properties


async def test_text_editor_describes_its_character_limit(definition_of: Any) -> None:
    tool = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
    assert "1234 characters" in (await definition_of(max_characters=1234, **tool))["description"]
