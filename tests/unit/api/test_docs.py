"""docs/api.md names every field, error code and route."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from starlette.routing import Route

from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.chat_schema import HARMLESS, NEUTRAL, ChatRequest
from vlm_server.errors import RequestError
from vlm_server.settings import Settings

DOCS = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
OBEYED = {field.name for field in msgspec.structs.fields(ChatRequest)}


@pytest.mark.parametrize("name", sorted(OBEYED | HARMLESS | NEUTRAL.keys()))
def test_every_field_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCS or f"`{name}." in DOCS


def error_codes(error: type[RequestError]) -> set[str]:
    return {error.code}.union(*map(error_codes, error.__subclasses__()))


@pytest.mark.parametrize("code", sorted(error_codes(RequestError)))
def test_every_error_code_is_documented(code: str) -> None:
    assert f"`{code}`" in DOCS


def test_every_route_is_documented() -> None:
    routes = create_app(Settings(), ScriptedEngine()).routes
    paths = [route.path for route in routes if isinstance(route, Route)]
    assert [path for path in paths if path.partition("{")[0] not in DOCS] == []
