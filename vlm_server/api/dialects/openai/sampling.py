"""The sampling parameters of a chat request, and which of them exclude each other."""

from __future__ import annotations

import re

from vlm_server.api.dialects.openai.schema import ChatRequest
from vlm_server.api.parsing.common_fields import max_tokens_or_default, stop_strings
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import SamplingParams
from vlm_server.settings import Limits

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""One spelling for each id. The engine checks that the id exists."""


def read_sampling(
    request: ChatRequest,
    limits: Limits,
    *,
    json_schema: str | None,
    must_call: bool = False,
    max_reasoning_tokens: int | None = None,
) -> SamplingParams:
    """For an answer that is held to `json_schema`, or `must_call`. Raises InvalidRequest."""
    max_tokens = _max_tokens(request)
    min_tokens = _min_tokens(request.min_tokens or 0, max_tokens)
    if must_call or json_schema is not None:
        _check_ends(request)
    return SamplingParams(
        max_tokens=max_tokens_or_default(max_tokens, limits, min_tokens),
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop=stop_strings(request.stop, "stop", limits),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=_logit_bias(request.logit_bias or {}),
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        logprobs=_logprobs(bool(request.logprobs), request.top_logprobs or 0),
        n=request.n or 1,
        json_schema=json_schema,
        max_reasoning_tokens=max_reasoning_tokens,
        reports_usage=_reports_usage(request),
    )


def _reports_usage(request: ChatRequest) -> bool:
    options = request.stream_options
    return options is not None and bool(options.continuous_usage_stats)


def _check_ends(request: ChatRequest) -> None:
    """JSON ends where it is complete, so its length can't be set."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise InvalidRequest(
                f"`{name}` can't be combined with a JSON `response_format`, nor with calls that "
                "must be made.",
                name,
            )


def _max_tokens(request: ChatRequest) -> int | None:
    given = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(given) > 1:
        raise InvalidRequest(
            "`max_tokens` and `max_completion_tokens` differ; send only one.", "max_tokens"
        )
    return given.pop() if given else None


def _min_tokens(min_tokens: int, max_tokens: int | None) -> int:
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest("`min_tokens` is above `max_tokens`.", "min_tokens")
    return min_tokens


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if not all(map(_TOKEN_ID.fullmatch, bias)):
        raise InvalidRequest("`logit_bias` has a key that is not a token id.", "logit_bias")
    return {int(token_id): value for token_id, value in bias.items()}


def _logprobs(wanted: bool, num_top: int) -> int | None:
    if num_top and not wanted:
        raise InvalidRequest("`top_logprobs` requires `logprobs`.", "top_logprobs")
    return num_top if wanted else None
