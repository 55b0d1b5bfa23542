"""Bodies of real clients, in tests/data/clients, are all answered.

`origin`: recorded, or written after the client's code; `ignored`: fields without effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.requests import ROUTE
from tests.unit.api.scripted_engine import ScriptedEngine

FOLDER = Path(__file__).parents[2] / "data" / "clients"
ALL: dict[str, Any] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")
}
RECORDS = {name: record for name, record in ALL.items() if "ignored" in record}


@pytest.mark.parametrize("name", sorted(RECORDS))
async def test_recorded_client_body_is_answered(
    client: httpx.AsyncClient, engine: ScriptedEngine, name: str
) -> None:
    record = RECORDS[name]
    body, route = record["body"], record.get("path", ROUTE)
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    sent = body.get("messages", body.get("input", ()))
    assert len(engine.submitted[0].messages) == len(sent)
    assert len(engine.submitted[0].images) == json.dumps(body).count("iVBORw0KGgo")
    named = answer.headers.get("x-vlm-ignored")
    assert (named.split(", ") if named else []) == record["ignored"]
