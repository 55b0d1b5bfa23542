"""The pages of the HTTP API name every field, error code and route, docs/status.md every reading,
and docs/operations.md every metric."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import get_args

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from tests.unit.api.admin.scrapes import full_scrape
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.dialects.openai.schema import HARMLESS, NEUTRAL, ChatRequest
from vlm_server.errors import RequestError
from vlm_server.protocol import CacheStats, MemoryStats, PhaseName, Stats
from vlm_server.settings import MetricsSettings, Settings

FOLDER = Path(__file__).parents[3] / "docs"
ROUTES, CHAT, ERRORS, STATUS, OPERATIONS = (
    (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    for name in ("api", "chat", "errors", "status", "operations")
)
OBEYED = {field.name for field in msgspec.structs.fields(ChatRequest)}


def test_every_api_field_is_documented() -> None:
    names = OBEYED | HARMLESS | NEUTRAL.keys()
    assert [name for name in names if f"`{name}`" not in CHAT and f"`{name}." not in CHAT] == []


def error_codes(error: type[RequestError]) -> set[str]:
    return {error.code}.union(*map(error_codes, error.__subclasses__()))


def test_every_error_code_is_documented() -> None:
    assert [code for code in error_codes(RequestError) if f"`{code}`" not in ERRORS] == []


def test_every_api_route_is_documented() -> None:
    routes = create_app(Settings(), OneModel(ScriptedEngine())).routes
    paths = [route.path for route in routes if isinstance(route, Route)]
    ours = [path for path in paths if "/api/" not in path or "/v0/" in path]  # else: ollama.md
    assert [path for path in ours if path.partition("{")[0] not in ROUTES] == []


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
