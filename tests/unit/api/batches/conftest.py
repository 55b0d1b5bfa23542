"""An application whose lane runs batches, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.unit.api.conftest import parsing_pool
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.batches.lane import Lane
from vlm_server.api.files.store import FileStore
from vlm_server.settings import BatchSettings, Settings

ROUTE = "/v1/chat/completions"
FAST = BatchSettings(min_idle_seconds=0.05, on_battery=True)
KEYS = ("the-first-key", "the-second-key")
Line = dict[str, Any]


class Daemon:
    """The application, as the front starts and ends it."""

    def __init__(self, engine: ScriptedEngine, settings: Settings) -> None:
        self.files = FileStore(settings.files)
        self.app = create_app(settings, OneModel(engine), parsing_pool(), files=self.files)
        self.lane: Lane = self.app.state.lane
        self.lane.resume(self.app)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://127.0.0.1:8000",
        )

    async def stop(self) -> None:
        await self.lane.stop()
        await self.client.aclose()
        self.files.close()

    async def upload(self, *lines: Line | str, **headers: str) -> str:
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        answer = await self.client.post(
            "/v1/files",
            files={"file": ("batch.jsonl", "\n".join(texts).encode())},
            data={"purpose": "batch"},
            headers=headers,
        )
        return str(answer.json()["id"])

    async def create(self, *lines: Line | str, headers: Any = None, **fields: Any) -> Any:
        file_id = await self.upload(*lines, **(headers or {}))
        body = {"input_file_id": file_id, "endpoint": ROUTE, "completion_window": "24h", **fields}
        answer = await self.client.post("/v1/batches", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def batch(self, batch: Any, **headers: str) -> Any:
        return (await self.client.get(f"/v1/batches/{batch['id']}", headers=headers)).json()

    async def ended(self, batch: Any, *states: str, **headers: str) -> Any:
        states = states or ("completed", "failed", "cancelled", "expired")
        async with asyncio.timeout(10):
            while True:
                found = await self.batch(batch, **headers)
                if found["status"] in states:
                    return found
                await asyncio.sleep(0.02)

    async def read(self, file_id: str) -> list[Any]:
        content = (await self.client.get(f"/v1/files/{file_id}/content")).text
        return [json.loads(line) for line in content.splitlines()]


Start = Callable[..., Daemon]


@pytest.fixture
async def start(engine: ScriptedEngine) -> AsyncIterator[Start]:
    daemons = list[Daemon]()

    def begin(batches: BatchSettings = FAST, **sections: Any) -> Daemon:
        daemons.append(Daemon(engine, Settings(batches=batches, **sections)))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        await daemon.stop()
