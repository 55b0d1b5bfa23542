"""docs/ollama.md names every field and every route."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.routing import Route

from tests.unit.api.dialects.ollama.test_fields import IGNORED_OPTIONS
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.dialects.ollama import models
from vlm_server.api.dialects.ollama.models import Details
from vlm_server.api.dialects.ollama.render import AnswerMessage, Line, ToolCall
from vlm_server.api.dialects.ollama.schema import (
    ChatMessage,
    Function,
    ModelOptions,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from vlm_server.settings import Settings

DOCS = (Path(__file__).parents[5] / "docs" / "ollama.md").read_text(encoding="utf-8")
STRUCTS: list[type[msgspec.Struct]] = [
    *(
        OllamaChatRequest,
        OllamaGenerateRequest,
        ChatMessage,
        ModelOptions,
        AnswerMessage,
        Line,
        ToolCall,
    ),
    *(models.ListedModel, models.RunningModel, models.ShownModel, Details),
]
UNTOLD = {"modelfile"}
FIELDS = {name for struct in STRUCTS for name in struct.__struct_fields__} - UNTOLD


def test_every_field_is_documented() -> None:
    names = FIELDS | IGNORED_OPTIONS.keys()
    assert [name for name in names if f"`{name}`" not in DOCS] == []


def test_every_field_of_a_tool_is_documented() -> None:
    assert [name for name in Function.__struct_fields__ if f'"{name}"' not in DOCS] == []


def test_every_route_is_documented() -> None:
    routes = create_app(Settings(), OneModel(ScriptedEngine())).routes
    paths = [route.path for route in routes if isinstance(route, Route)]
    ours = [path for path in paths if path.startswith("/api/") and "/v0/" not in path]
    assert [path for path in ours if f"{path}`" not in DOCS] == []


def test_the_version_is_documented() -> None:
    assert f"`{models.API_VERSION}`" in DOCS
