"""docs/responses.md names every field, item, part, event and route."""

from __future__ import annotations

import typing
from pathlib import Path

import msgspec
from starlette.routing import Route

from tests.unit.api.dialects.responses.test_openai_client import EVENTS
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.dialects.responses import items, schema
from vlm_server.settings import Settings

DOCS = (Path(__file__).parents[5] / "docs" / "responses.md").read_text(encoding="utf-8")
STRUCTS = (
    *(schema.ResponsesRequest, schema.FunctionTool, schema.AllowedToolsChoice, schema.TextConfig),
    *(schema.ReasoningConfig, schema.Thinking, schema.StreamOptions),
)
FIELDS = {field.name for struct in STRUCTS for field in msgspec.structs.fields(struct)}
TAGS = {
    str(struct.__struct_config__.tag)
    for struct in (*typing.get_args(items.Item), *typing.get_args(items.MessagePart))
}


def test_every_responses_name_is_documented() -> None:
    names = {*FIELDS, *schema.HARMLESS, *schema.NEUTRAL, *TAGS, *EVENTS}
    assert [name for name in names if f"`{name}`" not in DOCS and f'"{name}"' not in DOCS] == []


def test_every_responses_route_is_documented() -> None:
    routes = create_app(Settings(), OneModel(ScriptedEngine())).routes
    paths = {route.path for route in routes if isinstance(route, Route)}
    ours = {path for path in paths if path.startswith("/v1/responses")}
    assert len(ours) == 5
    assert [path for path in sorted(ours) if f" {path}`" not in DOCS] == []
