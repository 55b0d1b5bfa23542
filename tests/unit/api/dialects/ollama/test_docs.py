"""docs/ollama.md names every field of requests and answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct, structs

from tests.unit.api.dialects.ollama.steps import called
from tests.unit.api.dialects.ollama.test_fields import IGNORED_OPTIONS, chat, generate
from tests.unit.api.dialects.ollama.test_ollama_client import FACTS
from tests.unit.api.fields.vector_fields import VECTORS
from tests.unit.api.scripted_engine import ScriptedEngine, ended, scored, thinks
from vlm_server.api.dialects.ollama.embeddings import EmbeddingsRequest, EmbedRequest
from vlm_server.api.dialects.ollama.schema import (
    ChatMessage,
    Function,
    ModelOptions,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from vlm_server.protocol import Finished, ImageUse, TokenLogprob, TokenText, Usage

DOCS = (Path(__file__).parents[5] / "docs" / "ollama.md").read_text(encoding="utf-8")
STRUCTS: tuple[type[Struct], ...] = (
    OllamaChatRequest,
    OllamaGenerateRequest,
    EmbedRequest,
    EmbeddingsRequest,
    ChatMessage,
    ModelOptions,
)
FIELDS = {name for struct in STRUCTS for name in struct.__struct_fields__}
UNDOCUMENTED = {"modelfile", "models"}
OBJECTS = {"message", "models", "tool_calls", "details"}
"""Fields of answers whose own fields are documented one by one."""


def names_of(answer: Any) -> set[str]:
    """The names of the fields of an answer, and of its objects."""
    if isinstance(answer, list):
        return set[str]().union(*map(names_of, answer))
    if not isinstance(answer, dict):
        return set()
    return answer.keys() | names_of([answer[name] for name in OBJECTS & answer.keys()])


def test_every_ollama_request_field_is_documented() -> None:
    names = FIELDS | IGNORED_OPTIONS.keys()
    assert [name for name in names if f"`{name}`" not in DOCS] == []


async def test_every_ollama_answer_field_is_documented(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.status = replace(engine.status, model_facts=FACTS)
    entry = TokenLogprob(TokenText("Hi", -0.25), ())
    with_image = Finished("", Usage(7, 2), images=(ImageUse(8, 8, 1),))
    engine.script = (
        *(thinks("Hm."), scored("Hi", entry), called(0, "call_1", "look", "{}"), ended()),
        lambda request_id: structs.replace(with_image, request_id=request_id),
    )
    answers = [
        (await client.post("/api/chat", json=chat())).json(),
        (await client.post("/api/generate", json=generate())).json(),
        (await client.post("/api/show", json={"model": "demo"})).json(),
        (await client.get("/api/tags")).json(),
        (await client.get("/api/ps")).json(),
    ]
    engine.script = VECTORS
    for route in ("/api/embed", "/api/embeddings"):
        body = {"input": "hi"} if route == "/api/embed" else {"prompt": "hi"}
        answers.append((await client.post(route, json=body)).json())
    names = names_of(answers) - UNDOCUMENTED
    assert {"thinking", "tool_calls", "usage", "response", "logprobs", "size_vram"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in DOCS] == []


def test_every_ollama_tool_field_is_documented() -> None:
    assert [name for name in Function.__struct_fields__ if f'"{name}"' not in DOCS] == []
