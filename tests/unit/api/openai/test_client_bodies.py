"""Bodies that real clients send, in tests/data/clients: all are answered, nothing stops them.

`origin` says whether a body was recorded or written after its client; `ignored` what has no effect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.requests import ROUTE
from tests.unit.api.scripted_engine import ScriptedEngine

FOLDER = Path(__file__).parents[3] / "data" / "clients"
ALL: dict[str, Any] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")
}
RECORDS = {name: record for name, record in ALL.items() if record.get("path", ROUTE) == ROUTE}


@pytest.mark.parametrize("name", sorted(RECORDS))
async def test_a_clients_body_is_answered(
    client: httpx.AsyncClient, engine: ScriptedEngine, name: str
) -> None:
    record = RECORDS[name]
    answer = await client.post(ROUTE, json=record["body"])
    assert answer.status_code == 200, answer.text
    assert len(engine.submitted[0].messages) == len(record["body"]["messages"])
    named = answer.headers.get("x-vlm-ignored")
    assert (named.split(", ") if named else []) == record["ignored"]
