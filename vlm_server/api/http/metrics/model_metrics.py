"""What is counted of all answers, by model, since the front's start."""

from __future__ import annotations

from collections import defaultdict

from vlm_server.api.http.metrics.histogram import SECONDS, TOKENS, Histogram

REASONS = ("stop", "length", "tool_calls", "abort", "error")
"""How a request ends: a finish reason, its client has left, or it failed."""


class ModelMetrics:
    """Of the requests that were handed to one model's engine; seconds and tokens of each.

    `AnswerRecorder` writes it; docs/operations.md says what each is, and from where to where.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_running = 0
        self.ended = dict.fromkeys(REASONS, 0)
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token_latency = Histogram(SECONDS)
        self.longest_silence = Histogram(SECONDS)
        self.latency = Histogram(SECONDS)
        self.phases = {
            name: Histogram(SECONDS) for name in ("queue", "prepare", "encode", "prefill", "decode")
        }
        self.inference = Histogram(SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.image_tokens = Histogram(TOKENS)


MetricsByModel = defaultdict[str, ModelMetrics]
"""By the name of the model, which is the server's: clients can't make up any."""


def no_metrics() -> MetricsByModel:
    return MetricsByModel(ModelMetrics)
