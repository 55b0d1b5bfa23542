"""`POST /v1/rerank`: documents, texts or pictures, in the order in which they suit a query.

The forms of bodies and answers are those of Jina and Cohere, as vLLM has them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, msgpack

from vlm_server.api.dialects.fields import Count, prepare, read_request, submit_pooling
from vlm_server.api.dialects.openai import schema
from vlm_server.api.dialects.openai.embeddings import usage_json
from vlm_server.api.dialects.openai.pooling_inputs import MAX_VALUES, InputParser, check_inputs
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import model_wanted
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.media.video_options import MediaOptions
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.protocol import Finished, Pooling

DIALECT = "openai-rerank"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "max_chunks_per_doc": (None,),
    "max_tokens_per_doc": (None,),
    "rank_fields": (None, [], ["text"]),
    "truncate_prompt_tokens": (None,),
}
"""Cohere's and vLLM's fields that are not supported, with their values without effect."""


class RerankRequest(MediaOptions, forbid_unknown_fields=True, kw_only=True):
    """A request; the query and each document have a form of `pooling_inputs`."""

    query: str | list[Any] | dict[str, Any]
    documents: Annotated[list[Any], Meta(min_length=1)]
    model: str | None = None
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: str | None = None


prepare(RerankRequest)


class Options(Struct, frozen=True):
    """The renderer's options. documents: the JSON of each, if the answer is to have them."""

    top_n: int = 0
    documents: tuple[bytes, ...] = ()


def parse_rerank(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError, BytesNeeded and NeedsProcess."""
    fields = json_body.parse_object(body, MAX_VALUES)
    request, ignored = read_request(
        fields, RerankRequest, {}, context, harmless=schema.HARMLESS, neutral=NEUTRAL
    )
    model = model_wanted(request.model, context)
    conversation = Conversation.of(context, "documents")
    conversation.set_media_options(request)
    check_inputs([request.query, *request.documents], context.limits, "documents")
    parser = InputParser(conversation, ignored)
    inputs = (
        parser.parse(request.query, "query"),
        *(
            parser.parse(document, f"documents[{i}]")
            for i, document in enumerate(request.documents)
        ),
    )
    conversation.check_complete()
    instruction = conversation.count_text(request.instruction or "", "instruction")
    submit = submit_pooling(
        inputs, conversation, context, Pooling("score", instruction=instruction)
    )
    documents = request.documents if request.return_documents else []
    options = Options(request.top_n or 0, tuple(map(_document, documents)))
    return ParsedRequest(
        model.name, submit, stream=False, options=msgpack.encode(options), ignored=ignored.names
    )


def _document(document: Any) -> bytes:
    """A document as the answer has it: a text is an object there."""
    if isinstance(document, str):
        document = {"text": document}
    elif isinstance(document, list):
        document = {"content": document}
    return msgspec.json.encode(document)


def encode_ranking(request_id: str, model: str, options: bytes, finished: Finished) -> bytes:
    """The documents that suit the query best, in this order; equal ones in the request's."""
    wanted, scores = msgpack.decode(options, type=Options), finished.scores
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = list[dict[str, Any]]()
    for index in order[: wanted.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if wanted.documents:
            result["document"] = msgspec.Raw(wanted.documents[index])
        results.append(result)
    answer = {"id": request_id, "model": model, "results": results, "usage": usage_json(finished)}
    return msgspec.json.encode(answer)
