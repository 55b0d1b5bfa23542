"""`POST /v1/tokenize` and `POST /v1/detokenize`: prompts as tokens and back, without an answer.

The forms of bodies and answers are vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import (
    Count,
    check_prompt,
    prepare,
    read_request,
    submit_prompt,
    to_count_request,
)
from vlm_server.api.dialects.openai import parse
from vlm_server.api.dialects.openai.schema import ChatRequest
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import model_wanted
from vlm_server.api.parsing.ignored_fields import IgnoredFields, check_neutral
from vlm_server.api.parsing.media.video_options import MediaOptions
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Finished, SamplingParams

TOKENIZE, DETOKENIZE = "openai-tokenize", "openai-detokenize"

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "return_token_strs": (None, False),
}
"""vLLM's fields that are not supported, with their values without effect."""
ADDS_SPECIAL = "add_special_tokens"
"""A field supported with one value: true for a prompt; false for messages, since their template
writes special tokens."""


class PromptRequest(Struct, forbid_unknown_fields=True):
    """The body of `/v1/tokenize` without messages."""

    prompt: str
    model: str | None = None


class TokensRequest(Struct, forbid_unknown_fields=True):
    """The body of `/v1/detokenize`."""

    tokens: Annotated[list[Count], Meta(min_length=1)]
    model: str | None = None


prepare(PromptRequest, TokensRequest)


def parse_prompt(body: Body, context: Context) -> ParsedRequest:
    """The request in a body of `/v1/tokenize`. Raises RequestError and BytesNeeded."""
    fields = json_body.parse_object(body)
    if ("messages" in fields) == ("prompt" in fields):
        raise InvalidRequest("Either `prompt` or `messages` must be given.", "prompt")
    for name, values in {**NEUTRAL, ADDS_SPECIAL: (None, "prompt" in fields)}.items():
        check_neutral(name, fields.pop(name, None), values)
    if "messages" in fields:
        return _to_count_request(parse.parse_fields(fields, context), fields)
    request, ignored = read_request(fields, PromptRequest, {}, context)
    return _count_request(check_prompt(request.prompt, context), request.model, context, ignored)


def parse_tokens(body: Body, context: Context) -> ParsedRequest:
    """The request in a body of `/v1/detokenize`. Raises RequestError."""
    request, ignored = read_request(json_body.parse_object(body), TokensRequest, {}, context)
    return _count_request(tuple(request.tokens), request.model, context, ignored)


def _count_request(
    prompt: str | tuple[int, ...], model: str | None, context: Context, ignored: IgnoredFields
) -> ParsedRequest:
    known_model = model_wanted(model, context)
    submit = submit_prompt(prompt, context, SamplingParams())
    return to_count_request(
        ParsedRequest(known_model.name, submit, stream=False, ignored=ignored.names)
    )


IN_PROMPT = frozenset(
    {
        *("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "messages"),
        *("model", "reasoning", "reasoning_effort", "thinking"),
        *("tool_choice", "tools", *MediaOptions.__struct_fields__),
    }
)
"""The fields of a chat request that may change its prompt; other fields are only checked."""


_NOT_IN_PROMPT = (
    *(name for name in ChatRequest.__struct_fields__ if name not in IN_PROMPT),
    *("reasoning.max_tokens", "thinking.budget_tokens"),
    *("tool_choice.function.name", "tools[].function.strict"),
)
"""Fields of a chat request without effect on its prompt."""


def _to_count_request(request: ParsedRequest, fields: dict[str, Any]) -> ParsedRequest:
    unprompted = IgnoredFields()
    unprompted.add_given(fields, *_NOT_IN_PROMPT)
    ignored = tuple(dict.fromkeys([*request.ignored, *unprompted.names]))
    return msgspec.structs.replace(to_count_request(request), ignored=ignored, conversation="")


# ---- answers -----------------------------------------------------------------------------


def encode_tokens(finished: Finished, max_model_len: int) -> bytes:
    """vLLM's answer with our extensions `images`, `videos` and `cached_tokens`."""
    answer = {
        "count": finished.usage.prompt_tokens,
        "max_model_len": max_model_len,
        "tokens": finished.token_ids,
        "images": finished.images,
        "videos": finished.videos,
        "cached_tokens": finished.usage.cached_tokens,
        "token_strs": None,
    }
    return msgspec.json.encode(answer)


def encode_text(finished: Finished) -> bytes:
    return msgspec.json.encode({"prompt": finished.text})
