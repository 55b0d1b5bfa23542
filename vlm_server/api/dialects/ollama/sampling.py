"""Ollama's `options`, `format` and `logprobs` as sampling parameters."""

from __future__ import annotations

from vlm_server.api.dialects.ollama.schema import INT32_MAX, ModelOptions, Request
from vlm_server.api.parsing.common_fields import max_tokens_or_default, stop_strings
from vlm_server.api.parsing.effort import longest_thought
from vlm_server.api.parsing.json_schema import ANY_OBJECT, schema_text
from vlm_server.protocol import SamplingParams
from vlm_server.settings import Limits

_FILL = -2
_LEAST_TOP_P = 1e-6
"""For 0, which leaves the likeliest token in Ollama."""


def read_sampling(request: Request, json_schema: str | None, limits: Limits) -> SamplingParams:
    """For an answer that is held to `json_schema`, if any. Raises InvalidRequest."""
    options = request.options or ModelOptions()
    return SamplingParams(
        max_tokens=max_tokens_or_default(_max_tokens(options.num_predict), limits),
        temperature=options.temperature,
        top_p=None if options.top_p is None else max(options.top_p, _LEAST_TOP_P),
        seed=None if options.seed == -1 else options.seed,
        stop=stop_strings(options.stop, "options.stop", limits),
        top_k=max(options.top_k or 0, 0),
        min_p=options.min_p or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        repetition_penalty=options.repeat_penalty or 1.0,
        logprobs=_logprobs(request),
        json_schema=json_schema,
        max_reasoning_tokens=longest_thought(
            request.think if isinstance(request.think, str) else None
        ),
    )


def _max_tokens(num_predict: int | None) -> int | None:
    """None is the default, as are 0 and -1; -2 is as many as the context has room for."""
    if num_predict == _FILL:
        return INT32_MAX
    return num_predict if num_predict is not None and num_predict > 0 else None


def _logprobs(request: Request) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def read_schema(request: Request, limits: Limits) -> str | None:
    """The one that `format` asks for. Raises InvalidRequest."""
    match request.format:
        case "json":
            return ANY_OBJECT
        case dict() as schema:
            return schema_text(schema, limits, "format")
    return None
