"""From the body of a legacy text completion to a `Submit` with a prompt in place of messages.

Runs on a thread or in an intake process: see `http.intake`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.json import Decoder

from vlm_server.api.dialects.openai.options import Options, encode_options
from vlm_server.api.dialects.openai.response_format import (
    ResponseFormat,
    ignore_labels,
    read_schema,
)
from vlm_server.api.dialects.openai.sampling import read_sampling
from vlm_server.api.dialects.openai.schema import (
    HARMLESS,
    INT32_MAX,
    INT64_MAX,
    MAX_BIASES,
    MAX_CHOICES,
    Bias,
    ChatRequest,
    MaxTokens,
    Penalty,
    StreamOptions,
)
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import StopString, model_wanted
from vlm_server.api.parsing.leniency import IgnoredFields, check_neutral, known_fields
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.errors import InvalidRequest, UnsupportedField
from vlm_server.protocol import Submit

DIALECT = "openai-completions"
DEFAULT_MAX_TOKENS = 16
"""As OpenAI documents for this endpoint. An answer that has to be longer may be so long."""
MAX_LOGPROBS = 5

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}
"""OpenAI's fields that are not supported, and the values of them that have no effect."""

TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=INT32_MAX)]], Meta(min_length=1)]


class CompletionRequest(Struct, forbid_unknown_fields=True):
    """`prompt` is one: a text, token ids, or a list with one of either."""

    prompt: str | list[Any]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: StopString | list[StopString] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None


_SAMPLING = (
    *("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("n", "response_format"),
)
"""The fields that mean what they mean in chat completions."""

Decoder(CompletionRequest)
"""See `schema`."""


def read(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError."""
    ignored = IgnoredFields()
    request = _request(json_body.parse_object(body), context, ignored)
    model = model_wanted(request.model, context)
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise InvalidRequest("`stream_options` requires `stream`.", "stream_options")
    schema = read_schema(request.response_format, context.limits)
    ignore_labels(request.response_format, ignored)
    submit = Submit(
        request_id=context.request_id,
        messages=(),
        images=(),
        sampling=read_sampling(_as_chat(request), context.limits, json_schema=schema),
        cache_salt=context.cache_salt,
        client=context.client,
        prompt=_prompt(request.prompt, context),
    )
    wanted = request.stream_options or StreamOptions()
    ignored.add("stream_options.include_obfuscation", wanted.include_obfuscation or None)
    options = Options(bool(wanted.include_usage), bool(wanted.continuous_usage_stats))
    return ParsedRequest(model.name, submit, stream, encode_options(options), ignored.names)


def _request(fields: dict[str, Any], context: Context, ignored: IgnoredFields) -> CompletionRequest:
    for name, values in NEUTRAL.items():
        check_neutral(name, fields.pop(name, None), values)
    for name in sorted(HARMLESS & fields.keys()):
        ignored.add(name, fields.pop(name))
    refuses = context.unknown_fields == "refuse"
    fields = known_fields(fields, CompletionRequest, ignored, refuses=refuses)
    return json_body.convert(fields, CompletionRequest, {})


def _as_chat(request: CompletionRequest) -> ChatRequest:
    """Its sampling parameters as those of a chat request."""
    shared = {name: getattr(request, name) for name in _SAMPLING}
    default = max(DEFAULT_MAX_TOKENS, request.min_tokens or 0)
    return ChatRequest(
        [],
        max_tokens=request.max_tokens or default,
        stream_options=request.stream_options,
        logprobs=request.logprobs is not None,
        top_logprobs=request.logprobs,
        **shared,
    )


def _prompt(given: str | list[Any], context: Context) -> str | tuple[int, ...]:
    """The one prompt that is `given`. Raises InvalidRequest."""
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise UnsupportedField("Only one prompt is supported; send a request each.", "prompt")
        given = given[0]
    if isinstance(given, str):
        limit = context.limits.max_text_bytes
        if json_body.utf8_length(given, "prompt") > limit:
            message = f"At most {limit} bytes of text are allowed (limits.max_text_bytes)."
            raise InvalidRequest(message, "prompt")
        return given
    try:
        return tuple(msgspec.convert(given, TokenIds))
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter at a lone surrogate
        message = "`prompt` must be a text, a list of token ids, or a list with one of either."
        raise InvalidRequest(message, "prompt") from None
