"""`POST /api/embed`, and the older `/api/embeddings` for one text."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, msgpack

from vlm_server.api.dialects.answer_parts import vectors_of
from vlm_server.api.dialects.fields import Size, prepare, submit_pooling
from vlm_server.api.dialects.ollama.model_fields import model_wanted
from vlm_server.api.dialects.ollama.parse import Options, keep_alive_of
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.conversation import Conversation, Counts
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Finished, Message, Pooling, PoolingInput, SamplingParams, Submit

EMBED = "ollama.embed"
EMBEDDINGS = "ollama.embeddings"
_DATA_IMAGE = "data:image/"


class EmbedRequest(Struct, kw_only=True):
    """The fields of `/api/embed`. `truncate`: inputs are never shortened here."""

    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Size | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class EmbeddingsRequest(Struct, kw_only=True):
    """The fields of `/api/embeddings`."""

    model: str | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


prepare(EmbedRequest, EmbeddingsRequest)


def parse_embed(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError and BytesNeeded."""
    fields = json_body.parse_object(body)
    request = json_body.convert(fields, EmbedRequest, {})
    ignored = IgnoredFields()
    ignored.add("truncate", request.truncate or None)
    texts = [request.input] if isinstance(request.input, str) else request.input or []
    if texts == [""]:
        texts = []
    place = "input" if isinstance(request.input, str) else "input[{}]"
    return _parsed(fields, request, texts, place, request.dimensions, ignored, context)


def parse_embeddings(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError and BytesNeeded."""
    fields = json_body.parse_object(body)
    request = json_body.convert(fields, EmbeddingsRequest, {})
    texts = [request.prompt] if request.prompt else []
    return _parsed(fields, request, texts, "prompt", None, IgnoredFields(), context)


def _parsed(
    fields: dict[str, Any],
    request: EmbedRequest | EmbeddingsRequest,
    texts: list[str],
    place: str,
    dimensions: int | None,
    ignored: IgnoredFields,
    context: Context,
) -> ParsedRequest:
    """The request for vectors of `texts`; without any, one that loads or unloads the model."""
    model = model_wanted(request.model, context.models)
    if model.stays_loaded or not context.is_admin:
        ignored.add("keep_alive", request.keep_alive)
    ignored.add("options", request.options)
    ignored.add_unread(fields, request)
    return ParsedRequest(
        model.name,
        _submit(texts, place, dimensions, context),
        stream=False,
        options=msgpack.encode(Options(request.model or model.name)),
        ignored=ignored.names,
        generates=bool(texts),
        keep_alive_seconds=keep_alive_of(request.keep_alive, context, unloads=not texts),
    )


def _submit(texts: list[str], place: str, dimensions: int | None, context: Context) -> Submit:
    if not texts:
        return Submit(context.request_id, (), (), SamplingParams(), client=context.client)
    limits, param = context.limits, place.partition("[")[0]
    if len(texts) > limits.max_inputs:
        raise InvalidRequest(
            f"At most {limits.max_inputs} inputs are allowed (limits.max_inputs).", param
        )
    num_images = sum(text.startswith(_DATA_IMAGE) for text in texts)
    Counts(0, len(texts), num_images, 0).check(limits, param)
    conversation = Conversation(limits, context.given, param, context.on_thread)
    inputs = tuple(_input(text, place.format(i), conversation) for i, text in enumerate(texts))
    conversation.check_complete()
    return submit_pooling(inputs, conversation, context, Pooling("embed", dimensions))


def _input(text: str, param: str, conversation: Conversation) -> PoolingInput:
    add = conversation.image if text.startswith(_DATA_IMAGE) else conversation.text
    parts = (add(text, param),)
    conversation.check_content("user", parts, param)
    return PoolingInput((Message("user", parts, param=param),), param=param)


# ---- the answers -------------------------------------------------------------------------


def encode_embed(_: str, model: str, options: bytes, finished: Finished) -> bytes:
    answer = {
        "model": msgpack.decode(options, type=Options).model,
        "embeddings": vectors_of(finished),
        "total_duration": max(1, round(finished.times.total_seconds * 1e9)),
        "load_duration": 0,
        "prompt_eval_count": finished.usage.prompt_tokens,
    }
    return msgspec.json.encode(answer)


def encode_embeddings(finished: Finished) -> bytes:
    [vector] = vectors_of(finished) or [[]]
    return msgspec.json.encode({"embedding": vector})
