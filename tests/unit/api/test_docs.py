"""docs/api.md names every field, error code, route, reading and metric."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.openai.schema import HARMLESS, NEUTRAL, ChatRequest
from vlm_server.errors import RequestError
from vlm_server.protocol import CacheStats, MemoryStats, Stats
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
    ours = [path for path in paths if "/api/" not in path or "/v0/" in path]  # else: ollama.md
    assert [path for path in ours if path.partition("{")[0] not in DOCS] == []


READINGS = [
    field.name for struct in (Stats, CacheStats) for field in msgspec.structs.fields(struct)
]


@pytest.mark.parametrize("name", READINGS)
def test_every_reading_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCS


async def test_every_metric_is_documented_with_its_labels(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    caches = (CacheStats("prefix", 1, 10, 5, 50, 2, 3, 4),)
    memory = MemoryStats(1, 2, 3, 4, 5, 6, 7, {"evict": 7}, 0.5)
    stats = Stats({"prefill": 3}, 5, {"runner": 5}, memory, 5000, caches=caches)
    engine.status = replace(engine.status, stats=stats)
    await client.get("/health/live")
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    samples = [sample for family in families for sample in family.samples]
    names = {f"{name}{{{','.join(labels)}}}" if labels else name for name, labels, *_ in samples}
    assert [name for name in sorted(names) if f"| `{name}` |" not in DOCS] == []
