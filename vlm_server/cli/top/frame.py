"""What `top` shows, made of readings of a daemon's status: counters become rates.

An engine reports about once a second, so that rates are of some seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vlm_server.cli.client.daemon import Daemon

_MAX_MODELS = 8
"""Loaded models that are read; each takes a request."""
WAITING = ("waiting", "waiting_for_memory", "waiting_for_model", "sent", "reading")
LATENCIES = {
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "queue": "request_queue_time_seconds",
    "whole": "e2e_request_latency_seconds",
}
"""The names here of the histograms in `/v1/status`."""

Status = dict[str, Any]
Reading = Mapping[str, Status]
"""The objects at `/v1/status` by model, the default model first; they differ in `engine` alone."""


class ModelFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A model: its memory in bytes, tokens per second, and the last answers' times in seconds.

    Rates and shares are None while unknown. `latencies` has percentiles by the names of
    `LATENCIES`.
    """

    name: str
    state: str
    progress: dict[str, Any] | None
    memory_bytes: int
    limit_bytes: int
    memory: dict[str, int] | None
    requests: int
    waiting: int
    written_per_second: float | None = None
    read_per_second: float | None = None
    cached_share: float | None = None
    """The part of prompt tokens since the engine's start that the prefix cache had."""
    latencies: dict[str, dict[str, float]] = {}


class LiveFrame(msgspec.Struct, frozen=True):
    """A request that is answered: as in `/v1/status`, with its rate in tokens per second."""

    id: str
    key: str | None
    model: str | None
    state: str
    done: int
    total: int
    images: int
    videos: int
    pages: int
    seconds: float
    tokens_per_second: float | None


class Frame(msgspec.Struct, frozen=True):
    """One picture of a daemon; `time` in seconds since 1970."""

    url: str
    time: float
    in_flight: int
    limit: int
    waiting: int
    tokens_per_second: float | None
    read_per_second: float | None
    models: list[ModelFrame]
    live: list[LiveFrame]
    ended: list[dict[str, Any]]
    """The requests that ended last, the newest first: docs/status.md."""


def read(daemon: Daemon) -> Reading:
    """The status of each loaded model. Raises CommandFailed."""
    first = daemon.status()
    statuses = {str(first["model"]): first}
    for model in first["models"]:
        if model["state"] == "ready" and model["name"] not in statuses and not model["base"]:
            if len(statuses) >= _MAX_MODELS:
                break
            statuses[model["name"]] = daemon.status(model["name"])
    return statuses


def frame_of(url: str, readings: Sequence[Reading]) -> Frame:
    """The frame of the last reading; its rates are since the first, None if there is no other."""
    *earlier, now = readings
    before = earlier[0] if earlier else {}
    status = next(iter(now.values()))
    requests = status["requests"]
    statuses = [next(iter(reading.values())) for reading in earlier]
    live = [_live(one, statuses, status["time"]) for one in requests["list"]]
    models = [
        _model(model, live, before.get(model["name"]), now.get(model["name"]))
        for model in status["models"]
    ]
    return Frame(
        url=url,
        time=status["time"],
        in_flight=requests["in_flight"],
        limit=requests["limit"],
        waiting=sum(one.state in WAITING for one in live),
        tokens_per_second=_sum(model.written_per_second for model in models),
        read_per_second=_sum(model.read_per_second for model in models),
        models=models,
        live=live,
        ended=requests.get("ended", []),  # a daemon of before has none
    )


def _live(told: Status, earlier: Sequence[Status], now: float) -> LiveFrame:
    """A request; its rate is since it was first seen in its state."""
    rate = None
    for status in earlier if told["total"] else ():
        same = [one for one in status["requests"]["list"] if one["id"] == told["id"]]
        if same and same[0]["state"] == told["state"] and now > status["time"]:
            rate = max(0, told["done"] - same[0]["done"]) / (now - status["time"])
            break
    return msgspec.convert({**told, "tokens_per_second": rate}, LiveFrame)


def _model(
    told: Status, live: list[LiveFrame], before: Status | None, now: Status | None
) -> ModelFrame:
    mine = [one for one in live if one.model == told["name"]]
    stats = now["engine"]["stats"] if now else None
    read_tokens, known_tokens = _prompt_tokens(stats)
    return ModelFrame(
        name=told["name"],
        state=told["state"],
        progress=told["progress"],
        memory_bytes=told["memory_bytes"],
        limit_bytes=told["limit_bytes"],
        memory=told.get("memory"),
        requests=len(mine),
        waiting=sum(one.state in WAITING for one in mine),
        written_per_second=_rate("generated_tokens", before, now),
        read_per_second=_rate("prompt_tokens", before, now),
        cached_share=known_tokens / read_tokens if read_tokens else None,
        latencies=_latencies(now),
    )


def _prompt_tokens(stats: Status | None) -> tuple[int, int]:
    """Those that were read, and those of them that the prefix cache had."""
    return (stats["prompt_tokens"], stats["cached_tokens"]) if stats else (0, 0)


def _rate(counter: str, before: Status | None, now: Status | None) -> float | None:
    """Increase of a counter per second; None across a restart of the engine."""
    if before is None or now is None or before["engine"]["pid"] != now["engine"]["pid"]:
        return None
    old, new = before["engine"]["stats"], now["engine"]["stats"]
    seconds = now["time"] - before["time"]
    return max(0, new[counter] - old[counter]) / seconds if old and new and seconds > 0 else None


def _latencies(now: Status | None) -> dict[str, dict[str, float]]:
    told = now["latencies"] if now else {}
    found = {name: (told.get(key) or {}).get("percentiles") for name, key in LATENCIES.items()}
    return {name: percentiles for name, percentiles in found.items() if percentiles}


def _sum(rates: Any) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
