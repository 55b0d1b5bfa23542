"""The pages in docs/ name every field, item, event, error code, route, reading and metric."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from tests.unit.api.admin.scrapes import full_scrape
from tests.unit.api.dialects.responses.test_openai_client import EVENTS as RESPONSE_EVENTS
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.dialects.anthropic import errors as anthropic_errors
from vlm_server.api.dialects.anthropic import schema as anthropic_schema
from vlm_server.api.dialects.ollama import models as ollama_models
from vlm_server.api.dialects.openai.schema import HARMLESS, NEUTRAL, ChatRequest
from vlm_server.api.dialects.responses import items as response_items
from vlm_server.api.dialects.responses import schema as responses_schema
from vlm_server.errors import RequestError
from vlm_server.protocol import CacheStats, MemoryStats, PhaseName, Stats
from vlm_server.settings import MetricsSettings, Settings

FOLDER = Path(__file__).parents[3] / "docs"
ROUTES, CHAT, ERRORS, STATUS, OPERATIONS, ANTHROPIC, RESPONSES, OLLAMA = (
    (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    for name in (
        "api", "chat", "errors", "status", "operations", "anthropic", "responses", "ollama",
    )
)  # fmt: skip
PLAIN, OF_PART, QUOTED, INNER = "`{}`", "`{}.", '"{}"', ".{}`"
"""How a page may spell a name."""


def fields_of(*structs: Any) -> set[str]:
    return {name for struct in structs for name in struct.__struct_encode_fields__}


def tags_of(*structs: Any) -> set[str]:
    return {str(tag) for struct in structs if (tag := struct.__struct_config__.tag) is not None}


MESSAGES: list[Any] = [
    value
    for value in vars(anthropic_schema).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
]
MESSAGE_EVENTS = [
    "message_start", "content_block_start", "content_block_delta", "content_block_stop",
    "text_delta", "thinking_delta", "signature_delta", "input_json_delta", "message_delta",
    "message_stop", "ping", "error",
]  # fmt: skip
RESPONSE: list[Any] = [
    *(responses_schema.ResponsesRequest, responses_schema.FunctionTool),
    *(responses_schema.AllowedToolsChoice, responses_schema.TextConfig),
    *(responses_schema.ReasoningConfig, responses_schema.Thinking, responses_schema.StreamOptions),
]
ITEMS = (*get_args(response_items.Item), *get_args(response_items.MessagePart))


@pytest.mark.parametrize(
    ("page", "names", "spellings"),
    [
        (CHAT, fields_of(ChatRequest) | HARMLESS | NEUTRAL.keys(), (PLAIN, OF_PART)),
        (
            ANTHROPIC,
            fields_of(*MESSAGES)
            | tags_of(*MESSAGES)
            | {*MESSAGE_EVENTS, *anthropic_errors.TYPES.values()},
            (PLAIN, OF_PART, QUOTED, INNER),
        ),
        (
            RESPONSES,
            fields_of(*RESPONSE)
            | tags_of(*ITEMS)
            | {*responses_schema.HARMLESS, *responses_schema.NEUTRAL, *RESPONSE_EVENTS},
            (PLAIN, QUOTED),
        ),
        (OLLAMA, {ollama_models.API_VERSION}, (PLAIN,)),
    ],
    ids=["chat", "anthropic", "responses", "ollama"],
)
def test_every_name_of_dialect_is_documented(
    page: str, names: set[str], spellings: tuple[str, ...]
) -> None:
    missing = [name for name in names if not any(each.format(name) in page for each in spellings)]
    assert names
    assert missing == []


def error_codes(error: type[RequestError]) -> set[str]:
    return {error.code}.union(*map(error_codes, error.__subclasses__()))


def test_every_error_code_is_documented() -> None:
    assert [code for code in error_codes(RequestError) if f"`{code}`" not in ERRORS] == []


def test_every_route_is_documented() -> None:
    routes = create_app(Settings(), OneModel(ScriptedEngine())).routes
    paths = {route.path for route in routes if isinstance(route, Route)}
    ollama = {path for path in paths if path.startswith("/api/") and "/v0/" not in path}
    responses = {path for path in paths if path.startswith("/v1/responses")}
    assert [path for path in paths - ollama if path.partition("{")[0] not in ROUTES] == []
    assert [path for path in ollama if f"{path}`" not in OLLAMA] == []
    assert [path for path in responses if f" {path}`" not in RESPONSES] == []
    assert len(responses) == 5


READINGS = [
    field.name
    for struct in (Stats, MemoryStats, CacheStats)
    for field in msgspec.structs.fields(struct)
]


def test_every_status_reading_is_documented() -> None:
    assert [name for name in READINGS if f"`{name}`" not in STATUS] == []


HAS_PROC = Path("/proc/self/stat").exists()
ROW = re.compile(r"^\| `(?P<name>\w+)(\{(?P<labels>[\w,]+)\})?` \| (?P<type>\w+) \|", re.MULTILINE)


async def test_documented_metrics_and_labels_equal_scrape(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    families = text_string_to_metric_families(await full_scrape(client, engine))
    found = set()
    for family in families:
        labels = sorted(set(family.samples[0].labels) - {"le"})
        suffix = "_total" if family.type == "counter" else ""
        name = family.name.removeprefix(MetricsSettings().prefix)
        found.add((f"{name}{suffix}", ",".join(labels), family.type))
    rows = [(row["name"], row["labels"] or "", row["type"]) for row in ROW.finditer(OPERATIONS)]
    if not HAS_PROC:
        rows = [row for row in rows if not row[0].startswith("process_")]
    assert sorted(found) == sorted(rows)


async def test_every_log_field_is_documented(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vlm_server.api"):
        await client.get("/v1/models")
    (record,) = [record for record in caplog.records if record.name == "vlm_server.api"]
    section = OPERATIONS[OPERATIONS.index("## The log") :]
    assert [name for name in record.__dict__["fields"] if f"`{name}`" not in section] == []


def test_every_request_phase_is_documented() -> None:
    for phase in get_args(PhaseName):
        assert f"`{phase}`" in OPERATIONS
