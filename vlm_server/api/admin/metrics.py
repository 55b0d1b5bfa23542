"""`GET /metrics`, for Prometheus. Never sends the engine a request.

Values are collected at each scrape, so there is no registry to keep up to date. Metrics of the
engine are left out until it has reported its stats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Protocol

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from vlm_server.api.admin.engine_metrics import add_engine
from vlm_server.api.admin.families import Families
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.model_metrics import MetricsByModel, ModelMetrics
from vlm_server.api.http.queue_slots import QueueSlots
from vlm_server.supervisor.client import ModelClient


class Stored(Sized, Protocol):
    """The responses that the front keeps for clients."""

    limit_bytes: int
    num_evicted: int

    @property
    def size_bytes(self) -> int: ...


class Metrics:
    """The endpoint, and the collector it scrapes."""

    def __init__(
        self,
        prefix: str,
        models: ModelClient,
        queue_slots: QueueSlots,
        answered: AnsweredRequests,
        metrics: MetricsByModel,
        stored: Stored,
    ) -> None:
        """`prefix`: of all names."""
        self._prefix = prefix
        self._stored = stored
        self._models = models
        self._queue_slots = queue_slots
        self._answered = answered
        self._metrics = metrics

    async def scrape(self, _: Request) -> Response:
        return Response(generate_latest(self), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def collect(self) -> Iterator[Metric]:
        families = Families(self._prefix)
        _add_front(families, self._queue_slots, self._answered)
        _add_stored(families, self._stored)
        for name in self._models.names:
            add_engine(families, self._models.status(name))
            _add_answers(families, name, self._metrics[name])
        yield from families


def _add_front(families: Families, queue_slots: QueueSlots, answered: AnsweredRequests) -> None:
    waiting = "Bodies of requests that the device has not begun with."
    limit = "Limit on these: `limits.max_waiting_bytes`."
    families.gauges(
        (
            ("requests_in_flight", "Requests that hold a queue slot.", queue_slots.taken),
            ("requests_limit", "Queue slots: `limits.max_requests`.", queue_slots.limit),
            ("requests_waiting_bytes", waiting, queue_slots.waiting_bytes),
            ("requests_waiting_bytes_limit", limit, queue_slots.waiting_bytes_limit),
        )
    )
    help_text = "Requests that ended, by route and status."
    families.counter_family("requests", help_text, "route", "status")
    for (route, status), count in answered.items():
        families.counter("requests", help_text, count, route=route, status=str(status))


def _add_stored(families: Families, stored: Stored) -> None:
    limit = "Its limit: `server.responses_store_bytes`."
    families.gauges(
        (
            ("stored_responses", "Responses that clients may go on from.", len(stored)),
            ("stored_responses_size_bytes", "Size of these, with their turns.", stored.size_bytes),
            ("stored_responses_limit_bytes", limit, stored.limit_bytes),
        )
    )
    help_text = "Responses that were dropped for want of room."
    families.counter("stored_responses_evictions", help_text, stored.num_evicted)


_ANSWERS = {
    "time_to_first_token_seconds": "From the request's headers to the first text of its answer.",
    "inter_token_latency_seconds": "Between two deltas of a choice.",
    "stream_longest_silence_seconds": "The longest time between two deltas of a stream.",
    "e2e_request_latency_seconds": "From the request's headers to the last byte of its answer.",
    "request_inference_time_seconds": (
        "From when the device begins with a request to the last token."
    ),
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of an answer.",
    "request_image_tokens": "Tokens of a prompt's pictures, of prompts that have some.",
    "request_queue_time_seconds": (
        "Until the device begins with a request, without its preparation."
    ),
    "request_prepare_time_seconds": (
        "Template, tokenizer, and the decoding of pictures and videos."
    ),
    "request_encode_time_seconds": (
        "From the first picture's encoding to the last's, of requests that need it."
    ),
    "request_prefill_time_seconds": (
        "From the first chunk of a prompt, or its pictures' encoding, to the first token."
    ),
    "request_decode_time_seconds": "From the first token to the last.",
}
"""Histograms of answers, under vLLM's names where it has the same; see `ModelMetrics`."""


def _add_answers(families: Families, model: str, metrics: ModelMetrics) -> None:
    histograms = {
        "time_to_first_token_seconds": metrics.time_to_first_token,
        "inter_token_latency_seconds": metrics.inter_token_latency,
        "stream_longest_silence_seconds": metrics.longest_silence,
        "e2e_request_latency_seconds": metrics.latency,
        "request_inference_time_seconds": metrics.inference,
        "request_prompt_tokens": metrics.prompt_tokens,
        "request_generation_tokens": metrics.generation_tokens,
        "request_image_tokens": metrics.image_tokens,
        **{f"request_{phase}_time_seconds": each for phase, each in metrics.phases.items()},
    }
    for name, histogram in histograms.items():
        families.histogram(name, _ANSWERS[name], histogram, model_name=model)
    families.gauges(
        (
            (
                "num_requests_running",
                "Requests that the device has begun with.",
                metrics.num_running,
            ),
            ("num_requests_waiting", "Requests that it has not begun with.", metrics.num_waiting),
        ),
        model_name=model,
    )
    help_text = "Requests that ended, by why."
    for reason, count in metrics.ended.items():
        families.counter(
            "request_success", help_text, count, model_name=model, finished_reason=reason
        )
