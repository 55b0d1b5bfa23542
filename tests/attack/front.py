"""The real front on a socket, with a scripted worker that does what requests say."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from tests.support.scripted_daemon import ScriptedSupervisor
from tests.support.waiting import until
from tests.unit.api.scripted_engine import OneModel
from vlm_server.api.app import create_app
from vlm_server.settings import EngineSettings, Limits, Settings

ROUTE = "/v1/chat/completions"


class WatchedSupervisor(ScriptedSupervisor):
    """A supervisor that exposes its state of requests."""

    @property
    def tracked(self) -> dict[str, object]:
        """All state of requests; empty when idle."""
        return {
            "streams": set(self._in_flight._queues),
            "owed": self._watchdog.owed,
            "quarantine": self._quarantine.num_tracked,
        }


@dataclass
class Answer:
    """The answer as a client receives it."""

    status: int
    body: str

    @property
    def terminals(self) -> list[str]:
        """The ends of the answer; exactly one if all is well."""
        if not self.body.startswith("data:"):
            error = json.loads(self.body).get("error")
            return [error["code"] if error else "stop"]
        events = [line[5:].strip() for line in self.body.splitlines() if line.startswith("data:")]
        found = [json.loads(event) for event in events if event != "[DONE]"]
        errors = [event["error"]["code"] for event in found if "error" in event]
        return errors + [
            c["finish_reason"] for e in found for c in e.get("choices", ()) if c["finish_reason"]
        ]


@dataclass
class Front:
    supervisor: WatchedSupervisor
    http: httpx.AsyncClient

    async def ask(self, script: str, *, stream: bool = False) -> Answer:
        body = {
            "model": "default",
            "stream": stream,
            "messages": [{"role": "user", "content": script}],
        }
        response = await self.http.post(ROUTE, json=body)
        return Answer(response.status_code, response.text)

    def begin(self, script: str, *, stream: bool = False) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.ask(script, stream=stream))

    async def in_flight(self) -> int:
        status: dict[str, Any] = (await self.http.get("/v1/status")).json()
        return int(status["requests"]["in_flight"])

    async def is_ready(self) -> bool:
        return (await self.http.get("/health/ready")).status_code == 200

    async def until_ready(self) -> None:
        await until(lambda: self.supervisor.status.is_ready, 30)

    async def until_replaced(self, pid: int | None, seconds: float = 30) -> None:
        await until(lambda: self.supervisor.status.pid not in (pid, None), seconds)
        await self.until_ready()

    async def check_clean(self) -> None:
        """Assert that nothing of any request is left, and that the next one is answered."""
        await self.until_ready()
        answer = await self.ask("accept prefill token finish")
        assert (answer.status, answer.terminals) == (200, ["stop"])
        await until(lambda: not any(self.supervisor.tracked.values()), 5)
        assert await self.in_flight() == 0


@asynccontextmanager
async def running_front(limits: Limits | None = None, **engine: float) -> AsyncIterator[Front]:
    settings = Settings(
        limits=limits or Limits(),
        engine=EngineSettings(
            **{  # type: ignore[arg-type]
                "openblas": "off",
                "min_restart_backoff_seconds": 0.05,
                "silence_timeout_seconds": 0.6,
                **engine,
            }
        ),
    )
    supervisor = WatchedSupervisor(settings, lambda _stage, _fraction: None)
    app = create_app(settings, OneModel(supervisor))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    await supervisor.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
                await asyncio.wait_for(supervisor.wait_ready(), 30)
                yield Front(supervisor, http)
        finally:
            server.should_exit = server.force_exit = True
            await supervisor.stop()
            await serving
