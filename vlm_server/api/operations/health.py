"""`/health/live`, `/health/ready` and `/v1/status`. Never sends the engine a request."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.supervisor.client import EngineClient, EngineStatus


class Health:
    """The endpoints for probes and operators."""

    def __init__(self, engine: EngineClient, queue_slots: QueueSlots) -> None:
        self._engine = engine
        self._queue_slots = queue_slots

    async def live(self, _: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, _: Request) -> Response:
        status = self._engine.status
        body = {"status": status.state, "progress": _progress(status)}
        if status.is_ready:
            warnings = list(status.model_facts.warnings)
            return JSONResponse(body | ({"warnings": warnings} if warnings else {}))
        retry_after = max(1, math.ceil(status.retry_after_seconds))
        return JSONResponse(body, 503, headers={"Retry-After": str(retry_after)})

    async def status(self, _: Request) -> Response:
        status = self._engine.status
        return JSONResponse(
            {
                "model": status.model_name,
                "requests": {
                    "in_flight": self._queue_slots.taken,
                    "limit": self._queue_slots.limit,
                    "waiting_bytes": self._queue_slots.waiting_bytes,
                    "waiting_bytes_limit": self._queue_slots.waiting_bytes_limit,
                },
                "engine": {
                    "state": status.state,
                    "pid": status.pid,
                    "restarts": status.restarts,
                    "progress": _progress(status),
                    "quarantine": {
                        "shapes": status.quarantined_shapes,
                        "refusals": status.quarantine_refusals,
                    },
                    "stats": _stats(status),
                },
            }
        )


def _stats(status: EngineStatus) -> dict[str, Any] | None:
    if status.stats is None:
        return None
    stats: dict[str, Any] = msgspec.to_builtins(status.stats)
    stats.pop("type")
    return stats


def _progress(status: EngineStatus) -> dict[str, str | float] | None:
    if status.progress is None:
        return None
    stage, fraction = status.progress
    return {"stage": stage, "fraction": fraction}
