"""How long answers let wait, as histograms since the start: what clients of all dialects saw.

Buckets and names are vLLM's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from vlm_server.protocol import Tokens
from vlm_server.supervisor.client import RequestEvent

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Histogram:
    """Counts of values up to each of `bounds`, above the one before it, and above the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def to_json(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


class Latencies:
    """The times to first token, and between tokens. Used from the event loop only."""

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST_TOKEN)
        self.between_tokens = Histogram(_BETWEEN_TOKENS)

    async def timed(
        self, events: AsyncGenerator[RequestEvent, None], started: float
    ) -> AsyncGenerator[RequestEvent, None]:
        """`events` of a request that came at `started` of `time.perf_counter`."""
        last = None
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Tokens):
                    now = time.perf_counter()
                    if last is None:
                        self.first_token.observe(now - started)
                    else:
                        self.between_tokens.observe(now - last)
                    last = now
                yield event

    def to_json(self) -> dict[str, Any]:
        return {
            "time_to_first_token_seconds": self.first_token.to_json(),
            "inter_token_latency_seconds": self.between_tokens.to_json(),
        }
