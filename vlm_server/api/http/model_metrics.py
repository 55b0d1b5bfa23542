"""Histograms and counts of all answers, by model or API key, since the front's start."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.samples import Exemplar

from vlm_server.protocol import Usage

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0),
)
"""Buckets from a decode step of a small model to the longest deadline."""
TOKENS = (*(step * 10.0**power for power in range(6) for step in (1, 2, 5)), 1e6)
"""Buckets up to the longest context."""


class Histogram:
    """A Prometheus histogram with inclusive bounds, cheap enough to be written for each token.

    It also keeps its last values, whose percentiles are exact.
    """

    __slots__ = ("_bounds", "_counts", "_exemplars", "_recent", "_sum")

    def __init__(self, bounds: Sequence[float], num_recent: int = 0) -> None:
        """bounds: ascending; infinity is added. num_recent: the number of values to keep."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        self._sum = 0.0
        self._recent: deque[float] = deque(maxlen=num_recent)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._recent.append(value)

    def set_exemplar(self, value: float, trace_id: str) -> None:
        """Name the trace of a `value` that was observed, in place of its bucket's last one."""
        exemplar = Exemplar({"trace_id": trace_id}, value, time.time())
        self._exemplars[bisect_left(self._bounds, value)] = exemplar

    @property
    def sum(self) -> float:
        return self._sum

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, int]]:
        """(bound, number of values up to it) of each bucket, in Prometheus' form."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))

    def percentiles(self) -> dict[str, float] | None:
        """Percentiles of the last values by nearest rank, and their `count`; None without any."""
        if not self._recent:
            return None
        values, count = sorted(self._recent), len(self._recent)
        ranks = {f"p{each}": values[max(0, -(-each * count // 100) - 1)] for each in PERCENTILES}
        return {"count": count, **ranks, "max": values[-1]}

    def samples(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """`buckets`, those with an exemplar followed by it."""
        return [
            (*bucket, exemplar) if (exemplar := self._exemplars.get(number)) else bucket
            for number, bucket in enumerate(self.buckets())
        ]


PERCENTILES = (50, 90, 95, 99)
NUM_RECENT_ANSWERS, NUM_RECENT_TOKENS = 1000, 5000
"""The number of values of which percentiles are told."""
REASONS = ("stop", "length", "tool_calls", "abort", "error")
"""The ends of requests: a finish reason, a client that left, or an error."""


class ModelMetrics:
    """Metrics of one model's requests in seconds and tokens, see docs/operations.md."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_running = 0
        self.ended = dict.fromkeys(REASONS, 0)
        self.time_to_first_token = Histogram(SECONDS, NUM_RECENT_ANSWERS)
        self.inter_token_latency = Histogram(SECONDS, NUM_RECENT_TOKENS)
        self.longest_silence = Histogram(SECONDS)
        self.latency = Histogram(SECONDS, NUM_RECENT_ANSWERS)
        self.phases = {
            name: Histogram(SECONDS, NUM_RECENT_ANSWERS)
            for name in ("queue", "prepare", "encode", "prefill", "decode")
        }
        self.inference = Histogram(SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.image_tokens = Histogram(TOKENS)


MetricsByModel = defaultdict[str, ModelMetrics]
"""Metrics by model name; only served models, so that clients can't add names."""


def no_metrics() -> MetricsByModel:
    return MetricsByModel(ModelMetrics)


MAX_KEYS = 100
OTHER = "(other)"
"""The label of all keys after the first `MAX_KEYS`: counters must not fall when keys change."""


class KeyUsage:
    """Counts tokens; bounded, whatever the file of keys lists while the daemon runs."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._names: set[str] = set()
        self._prompt_tokens: Counter[tuple[str, str]] = Counter()
        self._generation_tokens: Counter[tuple[str, str]] = Counter()

    def add(self, key_name: str | None, model: str, usage: Usage) -> None:
        """Count an answer; `key_name` is the name of its key, never the key."""
        if not usage.prompt_tokens:
            return  # it did not end, or generates nothing
        name = key_name or ""
        if name not in self._names:
            if len(self._names) >= self._max_keys:
                name = OTHER
            else:
                self._names.add(name)
        self._prompt_tokens[name, model] += usage.prompt_tokens
        self._generation_tokens[name, model] += usage.completion_tokens

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        """(key, model, prompt tokens, generated tokens)."""
        for (name, model), prompt_tokens in self._prompt_tokens.items():
            yield name, model, prompt_tokens, self._generation_tokens[name, model]
