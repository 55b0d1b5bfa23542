"""Fields of `/v1/embeddings`, `/v1/rerank`, `/v1/decisions` and Ollama's `/api/embed`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.api.fields import video_fields
from tests.unit.api.fields.field import Dialect, Field, answers, ignored, refused, works
from tests.unit.api.fields.openai_fields import (
    CHAT,
    HARMLESS_FIELDS,
    OTHER_PNG,
    UNKNOWN_AT_THE_TOP,
    VIDEO_URL,
)
from tests.unit.api.requests import image_part, text, user
from tests.unit.api.scripted_engine import Step
from vlm_server.api.dialects.ollama.embeddings import EmbeddingsRequest, EmbedRequest
from vlm_server.api.dialects.openai import decisions, embeddings, rerank
from vlm_server.api.dialects.openai.decisions import DecisionRequest
from vlm_server.api.dialects.openai.embeddings import EmbeddingRequest
from vlm_server.api.dialects.openai.rerank import RerankRequest
from vlm_server.api.dialects.openai.schema import HARMLESS
from vlm_server.protocol import Decision, Finished, Usage, Vectors

USUAL: dict[str, Any] = {"model": "demo", "input": "hi"}
RANKED: dict[str, Any] = {"model": "demo", "query": "hi", "documents": ["ho", "ha"]}
DECIDED: dict[str, Any] = {
    "model": "demo",
    "state": "hi",
    "questions": {"q": {"instructions": "Which?", "criteria": ["a", "b"]}},
}
_ABOUT_MESSAGES = {key: DECIDED[key] for key in ("model", "questions")} | {
    "messages": CHAT.usual["messages"]
}
VIDEO = {"type": "video_url", "video_url": VIDEO_URL}
_OF_CONVERSATIONS = {"model", "messages"}

VECTORS: tuple[Step, ...] = (
    lambda request_id: Finished(
        request_id, Usage(3, 0, 2), vectors=(Vectors(bytes.fromhex("0000803f00000000"), 2),)
    ),
)
SCORES: tuple[Step, ...] = (
    lambda request_id: Finished(request_id, Usage(3, 0, 2), scores=(0.25, 0.5)),
)
DECISION: tuple[Step, ...] = (
    lambda request_id: Finished(request_id, Usage(3, 0, 2), decisions=(Decision((-0.5, -1.5), 0),)),
)


def _of_messages(field: Field) -> bool:
    """Whether a field of chat completions is one of a conversation to embed, too."""
    on = field.on or CHAT.usual
    return field.path.startswith("messages") and on.keys() <= _OF_CONVERSATIONS


EMBEDDINGS = Dialect(
    title="`/v1/embeddings`",
    route="/v1/embeddings",
    structs=(EmbeddingRequest,),
    usual=USUAL,
    fields=(
        works("model", "model", "other", fails=404),
        works("conversation or prompt", "input", ["hi", [5, 6]]),
        works("image", "input", [[image_part(OTHER_PNG), text()]]),
        *(replace(f, on=f.on or CHAT.usual) for f in CHAT.fields if _of_messages(f)),
        works("prompt of the input's type", "input_type", "query"),
        works("prompt of the input's type", "instruction", "Find it."),
        works("dimensions", "dimensions", 1),
        answers("form of the answer", "encoding_format", "base64"),
        *video_fields.of_request({**USUAL, "input": [[VIDEO]]}),
        *HARMLESS_FIELDS,
        UNKNOWN_AT_THE_TOP,
        refused("template of the request's own", "add_special_tokens", False, neutral=(True, None)),
        refused("length of vectors", "normalized", False, neutral=(True, None)),
        refused("shortening of the prompt", "truncate_prompt_tokens", 5, neutral=(None,)),
    ),
    more=HARMLESS | embeddings.NEUTRAL.keys(),
    script=VECTORS,
)
RERANK = Dialect(
    title="`/v1/rerank`",
    route="/v1/rerank",
    structs=(RerankRequest,),
    usual=RANKED,
    fields=(
        works("model", "model", "other", fails=404),
        works("conversation or prompt", "query", "what?"),
        works("conversation or prompt", "documents", ["ha", "ho"]),
        works("image", "documents", [{"image": OTHER_PNG}, "ha"]),
        works("prompt of the input's type", "instruction", "Find it."),
        answers("number of answers", "top_n", 1),
        answers("prompt in the answer", "return_documents", True),
        *video_fields.of_request({**RANKED, "query": [VIDEO]}),
        *HARMLESS_FIELDS,
        UNKNOWN_AT_THE_TOP,
        refused("shortening of the prompt", "max_chunks_per_doc", 5, neutral=(None,)),
        refused("shortening of the prompt", "max_tokens_per_doc", 5, neutral=(None,)),
        refused("shortening of the prompt", "truncate_prompt_tokens", 5, neutral=(None,)),
        refused("fields of documents", "rank_fields", ["title"], neutral=(["text"], [], None)),
    ),
    more=HARMLESS | rerank.NEUTRAL.keys(),
    script=SCORES,
)
DECISIONS = Dialect(
    title="`/v1/decisions`",
    route="/v1/decisions",
    structs=(DecisionRequest,),
    usual=DECIDED,
    fields=(
        works("model", "model", "other", fails=404),
        works("conversation or prompt", "state", {"a": ["ho"]}),
        works("questions", "questions", {"q": {"instructions": "Which?", "criteria": ["c", "d"]}}),
        works("image", "images", [OTHER_PNG]),
        *(
            replace(f, on={**_ABOUT_MESSAGES, **(f.on or {})})
            for f in CHAT.fields
            if _of_messages(f)
        ),
        *video_fields.of_request({**_ABOUT_MESSAGES, "messages": [user(VIDEO)]}),
        *HARMLESS_FIELDS,
        UNKNOWN_AT_THE_TOP,
        refused("audio, modalities", "audio", "UklGRg==", neutral=(None,)),
    ),
    more=HARMLESS | decisions.NEUTRAL.keys(),
    script=DECISION,
)
_OF_OLLAMA = (
    works("model", "model", "other", fails=404),
    ignored("engine's options", "options", {"num_ctx": 4}),
    ignored(
        "staying loaded",
        "keep_alive",
        "5m",
        where="for a pinned model, or without an admin key",
    ),
    ignored("at the top", "colour", "red", title="any"),
)
OLLAMA_EMBED = Dialect(
    title="Ollama embed",
    route="/api/embed",
    structs=(EmbedRequest,),
    usual=USUAL,
    fields=(
        *_OF_OLLAMA,
        works("conversation or prompt", "input", ["hi", "ho"]),
        works("image", "input", OTHER_PNG),
        works("dimensions", "dimensions", 1),
        ignored("shortening of the prompt", "truncate", True),
    ),
    script=VECTORS,
)
OLLAMA_EMBEDDINGS = Dialect(
    title="Ollama embeddings",
    route="/api/embeddings",
    structs=(EmbeddingsRequest,),
    usual={"model": "demo", "prompt": "hi"},
    fields=(*_OF_OLLAMA, works("conversation or prompt", "prompt", "ho")),
    script=VECTORS,
)
