"""`/health/live`, `/health/ready`, `/v1/loads`, `/v1/status`, and cancelling its requests."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

import vlm_server
from vlm_server.api.admin.metrics import device_caches
from vlm_server.api.batches.lane import Lane
from vlm_server.api.http import access_log
from vlm_server.api.http.access import keys
from vlm_server.api.http.ended_requests import EndedRequests
from vlm_server.api.http.generation import Generation
from vlm_server.api.http.model_metrics import Histogram, ModelMetrics
from vlm_server.api.parsing import served_models
from vlm_server.errors import Forbidden, ModelNotFound, NotFound
from vlm_server.protocol import RequestProgress, Stats
from vlm_server.supervisor.engine_process.client import EngineStatus


class Health:
    """The endpoints for probes and operators."""

    def __init__(self, shared: Generation, lane: Lane, ended: EndedRequests) -> None:
        self._ended = ended
        self._lane = lane
        self._models = shared.models
        self._slots = shared.queue_slots
        self._in_flight = shared.in_flight
        self._metrics = shared.metrics
        self._started_at = time.time()

    async def live(self, _: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, _: Request) -> Response:
        """Whether all pinned models are loaded. Other models are loaded on demand."""
        statuses = served_models.statuses(self._models)
        pinned = [status for status in statuses if self._models.is_pinned(status.model_name)]
        status = next((status for status in pinned if not status.is_ready), None)
        body: dict[str, Any] = {"status": "ready", "progress": None}
        if len(statuses) > 1:
            body["models"] = {status.model_name: status.state for status in statuses}
        if status is None:
            warnings = [text for status in statuses for text in status.model_facts.warnings]
            return JSONResponse(body | ({"warnings": warnings} if warnings else {}))
        body |= {"status": status.state, "progress": served_models.progress_of(status)}
        retry_after = max(1, math.ceil(status.retry_after_seconds))
        return JSONResponse(body, 503, headers={"Retry-After": str(retry_after)})

    async def loads(self, _: Request) -> Response:
        """SGLang's `/v1/loads`, for the Shepherd Model Gateway (docs/scale.md)."""
        num_running = sum(metrics.num_running for metrics in self._metrics.values())
        num_waiting = sum(metrics.num_waiting for metrics in self._metrics.values())
        load = {
            "dp_rank": 0,
            "num_running_reqs": num_running,
            "num_waiting_reqs": num_waiting,
            "num_total_reqs": num_running + num_waiting,
        }
        return JSONResponse({"dp_rank_count": 1, "loads": [load]})

    async def status(self, request: Request) -> Response:
        """The status of the engine of the query's `model`, or of the default model."""
        name = request.query_params.get("model", self._models.names[0])
        if name not in self._models.names:
            raise ModelNotFound("There is no such model.", "model")
        status = self._models.status(name)
        statuses = served_models.statuses(self._models)
        is_pinned = self._models.is_pinned
        models = [_model(status, is_pinned=is_pinned(status.model_name)) for status in statuses]
        return JSONResponse(
            {
                "model": status.model_name,
                "models": models,
                "version": vlm_server.__version__,
                "started_at": self._started_at,
                "time": time.time(),
                "requests": {
                    "in_flight": self._slots.requests.taken,
                    "limit": self._slots.requests.limit,
                    "waiting_bytes": self._slots.waiting_bytes.taken,
                    "waiting_bytes_limit": self._slots.waiting_bytes.limit,
                    "list": self._requests(statuses),
                    "ended": list(self._ended),
                },
                "batches": {
                    "active": self._lane.num_active,
                    "running_lines": self._lane.num_running,
                    "lines": dict(self._lane.lines),
                    "paused": self._lane.paused,
                },
                "latencies": _latencies(self._metrics[status.model_name]),
                "engine": _engine(status),
            }
        )

    def _requests(self, statuses: list[EngineStatus]) -> list[dict[str, Any]]:
        """The requests that hold a queue slot: their states, never their content."""
        stats = (status.stats for status in statuses if status.stats is not None)
        reported = {request.request_id: request for engine in stats for request in engine.progress}
        now, tracked = time.monotonic(), self._in_flight.items()
        return [_request(name, scope, reported.get(name), now) for name, scope in tracked]

    async def cancel(self, request: Request) -> Response:
        """Cancel one of the requests that `status` lists; without an admin key, one's own."""
        request_id, key = request.path_params["request_id"], keys.key_of(request.scope)
        scope = self._in_flight.get(request_id)
        is_own = scope is not None and keys.owner_of(scope) == key.identity
        if not (key.is_admin or is_own):
            raise Forbidden("Requests of other keys need a key with `admin = true`.")
        if not self._models.cancel(request_id):
            raise NotFound("There is no such request, or it has ended.")
        return JSONResponse({"id": request_id, "cancelled": True})


def _request(
    request_id: str, scope: Scope, progress: RequestProgress | None, now: float
) -> dict[str, Any]:
    """The JSON of a request; `progress` is the last report of its engine."""
    entry = access_log.entry_of(scope)
    first_at = None if entry.answer is None else entry.answer.first_at
    return {
        "id": request_id,
        "route": access_log.route_of(scope),
        "model": entry.model or None,
        "key": entry.key_name,
        "state": progress.state if progress else entry.state,
        "done": progress.done if progress else 0,
        "total": progress.total if progress else 0,
        "images": entry.images,
        "videos": entry.videos,
        "pages": entry.pages,
        "seconds": round(now - entry.received_at, 3),
        "first_token_seconds": None if first_at is None else round(first_at - entry.received_at, 3),
    }


def _model(status: EngineStatus, *, is_pinned: bool) -> dict[str, Any]:
    """The short JSON of a model; `memory_bytes` is the device memory of its engine."""
    memory = status.stats.memory if status.stats else None
    return {
        "name": status.model_name,
        "base": status.base,
        "state": status.state,
        "pinned": is_pinned,
        "progress": served_models.progress_of(status),
        "error": status.error or None,
        "expires_at": status.expires_at,
        "kept": status.is_kept,
        "memory_bytes": memory.active_bytes + memory.pool_bytes if memory else 0,
        "limit_bytes": memory.limit_bytes if memory else 0,
        "memory": _memory_parts(status.stats) if status.stats else None,
    }


def _memory_parts(stats: Stats) -> dict[str, int]:
    """What device memory is used for, as far as the engine can tell; the parts add up."""
    memory = stats.memory
    weights = min(memory.baseline_bytes, memory.active_bytes)
    used = memory.active_bytes - weights
    caches = min(used, sum(cache.size_bytes for cache in device_caches(stats)))
    return {
        "weights_bytes": weights,
        "kv_bytes": used - caches,
        "caches_bytes": caches,
        "pool_bytes": memory.pool_bytes,
        "limit_bytes": memory.limit_bytes,
    }


def _engine(status: EngineStatus) -> dict[str, Any]:
    stats = msgspec.to_builtins(status.stats)
    if stats is not None:
        del stats["type"], stats["progress"]  # requests are listed separately
    return {
        "state": status.state,
        "pid": status.pid,
        "restarts": status.restarts,
        "ends": msgspec.to_builtins(status.ends),
        "progress": served_models.progress_of(status),
        "quarantine": {
            "shapes": status.quarantined_shapes,
            "refusals": status.quarantine_refusals,
        },
        "stats": stats,
        "memory_samples": msgspec.to_builtins(list(status.memory_samples)),
    }


def _latencies(metrics: ModelMetrics) -> dict[str, Any]:
    return {
        "time_to_first_token_seconds": _histogram(metrics.time_to_first_token),
        "inter_token_latency_seconds": _histogram(metrics.inter_token_latency),
        "request_queue_time_seconds": _histogram(metrics.phases["queue"]),
        "e2e_request_latency_seconds": _histogram(metrics.latency),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """The JSON of a histogram, with separate instead of cumulative counts."""
    bounds, totals = zip(*histogram.buckets(), strict=True)
    counts = [total - before for total, before in zip(totals, (0, *totals), strict=False)]
    return {
        "bounds": [float(bound) for bound in bounds[:-1]],
        "counts": counts,
        "sum": histogram.sum,
        "percentiles": histogram.percentiles(),
    }
