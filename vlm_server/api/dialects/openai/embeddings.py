"""`POST /v1/embeddings`: vectors of texts, pictures and token ids, and the JSON of the answer.

OpenAI's request, with vLLM's `messages` and the `input_type` of retrieval models.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import msgspec
from msgspec import Struct, msgpack

from vlm_server.api.dialects.answer_parts import numbers, vectors_of
from vlm_server.api.dialects.fields import Size, prepare, read_request, submit_pooling
from vlm_server.api.dialects.openai import schema
from vlm_server.api.dialects.openai.messages import parse_messages
from vlm_server.api.dialects.openai.pooling_inputs import (
    MAX_VALUES,
    InputParser,
    InputType,
    TokenIds,
    check_inputs,
    pooling_type,
)
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import model_wanted
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.media.video_options import MediaOptions
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Finished, Pooling, PoolingInput

DIALECT = "openai-embeddings"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, True),
    "normalized": (None, True),
    "truncate_prompt_tokens": (None,),
}
"""vLLM's and Jina's fields that are not supported, with their values without effect."""


class EmbeddingRequest(MediaOptions, forbid_unknown_fields=True, kw_only=True):
    """A request; `input` is one input or a list of them, `messages` one conversation."""

    input: str | list[Any] | dict[str, Any] | None = None
    messages: list[schema.ChatMessage] | None = None
    model: str | None = None
    dimensions: Size | None = None
    encoding_format: Literal["float", "base64"] | None = None
    input_type: InputType | None = None
    instruction: str | None = None


prepare(EmbeddingRequest)
RULES = {"encoding_format": "must be 'float' or 'base64'", **schema.RULES}


class Options(Struct, frozen=True):
    """The renderer's options."""

    as_base64: bool = False


def parse_embeddings(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError, BytesNeeded and NeedsProcess."""
    fields = json_body.parse_object(body, MAX_VALUES)
    request, ignored = read_request(
        fields, EmbeddingRequest, RULES, context, harmless=schema.HARMLESS, neutral=NEUTRAL
    )
    model = model_wanted(request.model, context)
    conversation = Conversation.of(context, "input")
    conversation.set_media_options(request)
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("Either `input` or `messages` must be given.", "input")
    if request.messages is not None:
        parse_messages(request.messages, conversation, ignored)
        inputs: tuple[PoolingInput, ...] = (
            PoolingInput(tuple(conversation.messages), param="messages"),
        )
    else:
        inputs = _inputs(request.input, InputParser(conversation, ignored))
    conversation.check_complete()
    pooling = Pooling(
        "embed",
        request.dimensions,
        pooling_type(request.input_type),
        conversation.count_text(request.instruction or "", "instruction"),
    )
    submit = submit_pooling(inputs, conversation, context, pooling)
    options = msgpack.encode(Options(request.encoding_format == "base64"))
    return ParsedRequest(model.name, submit, stream=False, options=options, ignored=ignored.names)


def _inputs(value: Any, parser: InputParser) -> tuple[PoolingInput, ...]:
    """The inputs in `input`. A list of integers is one of token ids, any other has several."""
    limits = parser.conversation.limits
    if not isinstance(value, list):
        check_inputs([value], limits, "input")
        return (parser.parse(value, "input"),)
    if not value:
        raise InvalidRequest("`input` is empty.", "input")
    if isinstance(value[0], int):
        return (_token_ids(value, "input"),)
    check_inputs(value, limits, "input")
    return tuple(
        _token_ids(each, f"input[{i}]")
        if isinstance(each, list) and each and isinstance(each[0], int)
        else parser.parse(each, f"input[{i}]")
        for i, each in enumerate(value)
    )


def _token_ids(value: list[Any], param: str) -> PoolingInput:
    try:
        return PoolingInput(prompt=tuple(msgspec.convert(value, TokenIds)), param=param)
    except msgspec.ValidationError:
        raise InvalidRequest(f"`{param}` must have token ids alone.", param) from None


# ---- the answer --------------------------------------------------------------------------


def encode_embeddings(_: str, model: str, options: bytes, finished: Finished) -> bytes:
    """OpenAI's answer; where a model has several vectors for an input, they are a list."""
    as_base64 = msgpack.decode(options, type=Options).as_base64
    data = [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in enumerate(vectors_of(finished, _base64 if as_base64 else numbers))
    ]
    answer = {"object": "list", "data": data, "model": model, "usage": usage_json(finished)}
    return msgspec.json.encode(answer)


def usage_json(finished: Finished) -> dict[str, Any]:
    """OpenAI's usage of a request whose answer has no tokens."""
    usage = finished.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _base64(row: bytes) -> str:
    return b64encode(row).decode()
