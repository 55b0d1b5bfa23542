"""From the body of a legacy text completion to a `Submit` with a prompt in place of messages.

Runs on a thread or in a parsing process: see `api.parsing`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vlm_server.api.dialects.fields import (
    Count,
    check_prompt,
    ignore_labels,
    prepare,
    read_request,
    submit_prompt,
)
from vlm_server.api.dialects.openai import parse, schema
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import model_wanted
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.errors import InvalidRequest, UnsupportedField

DIALECT = "openai-completions"
DEFAULT_MAX_TOKENS = 16
"""The default that OpenAI documents for this endpoint; `min_tokens` may raise it."""
MAX_LOGPROBS = 5

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}
"""OpenAI's fields that are not supported, with their values without effect."""

TokenIds = Annotated[list[Count], Meta(min_length=1)]


class CompletionRequest(schema.AnswerFields, forbid_unknown_fields=True, kw_only=True):
    """A request; `prompt` is one text, token ids, or a list with one of either."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


prepare(CompletionRequest)


def parse_completion(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError."""
    fields = json_body.parse_object(body)
    request, ignored = read_request(
        fields, CompletionRequest, {}, context, harmless=schema.HARMLESS, neutral=NEUTRAL
    )
    model = model_wanted(request.model, context)
    options = parse.encode_options(request, ignored)
    json_schema = parse.parse_response_format(request.response_format, context.limits)
    if request.response_format is not None:
        ignore_labels(request.response_format.json_schema, parse.NAMED_SCHEMA, ignored)
    sampling = parse.parse_sampling(
        request,
        context.limits,
        max_tokens=request.max_tokens or max(DEFAULT_MAX_TOKENS, request.min_tokens or 0),
        logprobs=request.logprobs,
        json_schema=json_schema,
    )
    submit = submit_prompt(_prompt(request.prompt, context), context, sampling)
    return ParsedRequest(model.name, submit, bool(request.stream), options, ignored.names)


def _prompt(prompt: str | list[Any], context: Context) -> str | tuple[int, ...]:
    """The one prompt in `prompt`. Raises InvalidRequest."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise UnsupportedField("Only one prompt is supported; send a request each.", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return check_prompt(prompt, context)
    try:
        return tuple(msgspec.convert(prompt, TokenIds))
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter at a lone surrogate
        message = "`prompt` must be a text, a list of token ids, or a list with one of either."
        raise InvalidRequest(message, "prompt") from None
