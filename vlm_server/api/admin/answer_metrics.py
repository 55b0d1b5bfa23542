"""Metrics of answers, under the names that vLLM has where it has the same; see `ModelMetrics`."""

from __future__ import annotations

from vlm_server.api.admin.families import Families
from vlm_server.api.http.metrics.model_metrics import ModelMetrics


def add_answers(families: Families, model_name: str, metrics: ModelMetrics) -> None:
    """What was measured in the front, of the answers of one model."""
    _add_counts(families, model_name, metrics)
    for name, help_text, histogram in (
        (
            "time_to_first_token_seconds",
            "From the request's headers to the first text of its answer.",
            metrics.time_to_first_token,
        ),
        (
            "inter_token_latency_seconds",
            "Between two deltas of a choice.",
            metrics.inter_token_latency,
        ),
        (
            "stream_longest_silence_seconds",
            "The longest time between two deltas of a stream.",
            metrics.longest_silence,
        ),
        (
            "e2e_request_latency_seconds",
            "From the request's headers to the last byte of its answer.",
            metrics.latency,
        ),
        (
            "request_inference_time_seconds",
            "From when the device begins with a request to the last token.",
            metrics.inference,
        ),
        ("request_prompt_tokens", "Tokens of a prompt.", metrics.prompt_tokens),
        ("request_generation_tokens", "Tokens of an answer.", metrics.generation_tokens),
        (
            "request_image_tokens",
            "Tokens of a prompt's pictures, of prompts that have some.",
            metrics.image_tokens,
        ),
    ):
        families.histogram(name, help_text, histogram, model_name=model_name)
    for phase, help_text in _PHASES.items():
        histogram = metrics.phases[phase]
        families.histogram(
            f"request_{phase}_time_seconds", help_text, histogram, model_name=model_name
        )


_PHASES = {
    "queue": "Until the device begins with a request, without its preparation.",
    "prepare": "Template, tokenizer, and the decoding of pictures and videos.",
    "encode": "From the first picture's encoding to the last's, of requests that need it.",
    "prefill": "From the first chunk of a prompt, or its pictures' encoding, to the first token.",
    "decode": "From the first token to the last.",
}


def _add_counts(families: Families, model_name: str, metrics: ModelMetrics) -> None:
    families.gauge(
        "num_requests_running",
        "Requests that the device has begun with.",
        metrics.num_running,
        model_name=model_name,
    )
    families.gauge(
        "num_requests_waiting",
        "Requests that it has not begun with.",
        metrics.num_waiting,
        model_name=model_name,
    )
    for reason, count in metrics.ended.items():
        families.counter(
            "request_success",
            "Requests that ended, by why.",
            count,
            model_name=model_name,
            finished_reason=reason,
        )
