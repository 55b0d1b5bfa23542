"""`/health/live`, `/health/ready`, `/v1/status`, and the end of a request that it lists."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vlm_server.api.http.figures.figures import Figures, ModelFigures
from vlm_server.api.http.figures.histogram import Histogram
from vlm_server.api.http.in_flight import InFlight
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.errors import NotFound
from vlm_server.supervisor.client import EngineClient, EngineStatus


class Health:
    """The endpoints for probes and operators."""

    def __init__(
        self,
        engine: EngineClient,
        queue_slots: QueueSlots,
        in_flight: InFlight,
        figures: Figures,
    ) -> None:
        self._engine = engine
        self._queue_slots = queue_slots
        self._in_flight = in_flight
        self._figures = figures

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
        progress = status.stats.progress if status.stats else ()
        return JSONResponse(
            {
                "model": status.model_name,
                "time": time.time(),
                "requests": {
                    "in_flight": self._queue_slots.taken,
                    "limit": self._queue_slots.limit,
                    "waiting_bytes": self._queue_slots.waiting_bytes,
                    "waiting_bytes_limit": self._queue_slots.waiting_bytes_limit,
                    "list": self._in_flight.to_json(progress),
                },
                "latencies": _latencies(self._figures[status.model_name]),
                "engine": {
                    "state": status.state,
                    "pid": status.pid,
                    "restarts": status.restarts,
                    "ends": msgspec.to_builtins(status.ends),
                    "progress": _progress(status),
                    "quarantine": {
                        "shapes": status.quarantined_shapes,
                        "refusals": status.quarantine_refusals,
                    },
                    "stats": _stats(status),
                    "memory_samples": msgspec.to_builtins(list(status.memory_samples)),
                },
            }
        )

    async def cancel(self, request: Request) -> Response:
        """End one of the requests that `status` lists."""
        request_id = request.path_params["request_id"]
        if not self._engine.cancel(request_id):
            raise NotFound("There is no such request, or it has ended.")
        return JSONResponse({"id": request_id, "cancelled": True})


def _latencies(figures: ModelFigures) -> dict[str, Any]:
    return {
        "time_to_first_token_seconds": _histogram(figures.time_to_first_token),
        "inter_token_latency_seconds": _histogram(figures.inter_token_latency),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """With the count of each bucket by itself."""
    bounds, totals = zip(*histogram.buckets(), strict=True)
    counts = [total - before for total, before in zip(totals, (0, *totals), strict=False)]
    return {
        "bounds": [float(bound) for bound in bounds[:-1]],
        "counts": counts,
        "sum": histogram.sum,
    }


def _stats(status: EngineStatus) -> dict[str, Any] | None:
    if status.stats is None:
        return None
    stats: dict[str, Any] = msgspec.to_builtins(status.stats)
    del stats["type"], stats["progress"]  # the requests are listed apart
    return stats


def _progress(status: EngineStatus) -> dict[str, str | float] | None:
    if status.progress is None:
        return None
    stage, fraction = status.progress
    if (download := status.download) is None:
        return {"stage": stage, "fraction": fraction}
    return {
        "stage": stage,
        "fraction": fraction,
        "file": download.file,
        "bytes": download.done_bytes,
        "total_bytes": download.total_bytes,
    }
