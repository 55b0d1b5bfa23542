"""What became of requests, asked of real daemons or simulated ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it was sent and ended, in seconds since the beginning."""

    key: str
    turn: int
    worker: str
    sent: float
    ttft: float
    ended: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """hit_rate: cached tokens of all prompts' tokens. Rates are in a second."""

    requests: int
    ttft_p50: float
    ttft_p99: float
    ttft_mean: float
    hit_rate: float
    request_rate: float
    token_rate: float


def summarize(asked: Sequence[Asked], begin: float, end: float) -> Summary:
    """Of the requests that were sent from `begin` until before `end`; NaN if there are none."""
    chosen = [one for one in asked if begin <= one.sent < end]
    if not chosen:
        nan = float("nan")
        return Summary(
            requests=0,
            ttft_p50=nan,
            ttft_p99=nan,
            ttft_mean=nan,
            hit_rate=nan,
            request_rate=0.0,
            token_rate=0.0,
        )
    seconds = max(one.ended for one in chosen) - begin
    times = [one.ttft for one in chosen]
    return Summary(
        requests=len(chosen),
        ttft_p50=float(np.percentile(times, 50)),
        ttft_p99=float(np.percentile(times, 99)),
        ttft_mean=float(np.mean(times)),
        hit_rate=sum(one.cached_tokens for one in chosen)
        / sum(one.prompt_tokens for one in chosen),
        request_rate=len(chosen) / seconds,
        token_rate=sum(one.answer_tokens for one in chosen) / seconds,
    )
