"""The process that parses bodies of all dialects for the front: see `body_parser`."""

from __future__ import annotations

import logging
import sys

from vlm_server.api.dialects.anthropic import parse as anthropic
from vlm_server.api.dialects.ollama import embeddings as ollama_embeddings
from vlm_server.api.dialects.ollama import parse as ollama
from vlm_server.api.dialects.openai import completions, decisions, embeddings, rerank, tokenize
from vlm_server.api.dialects.openai import parse as openai
from vlm_server.api.dialects.responses import parse as responses
from vlm_server.api.parsing.media.documents import PagesNeeded
from vlm_server.api.parsing.media.external import BytesNeeded
from vlm_server.api.parsing.parsed_request import (
    HistoryNeeded,
    Outcome,
    Parse,
    encode_outcome,
    take_job,
)
from vlm_server.errors import InternalError, RequestError, RequestTooCostly
from vlm_server.platform import heap
from vlm_server.platform.child.serve import ChildLimits, serve
from vlm_server.settings import MIB

_RETIRE_BYTES = 256 * MIB
_PARSERS: dict[str, Parse] = {
    openai.DIALECT: openai.parse_chat,
    anthropic.DIALECT: anthropic.parse_message,
    anthropic.COUNT_DIALECT: anthropic.parse_count,
    completions.DIALECT: completions.parse_completion,
    embeddings.DIALECT: embeddings.parse_embeddings,
    decisions.DIALECT: decisions.parse_decisions,
    rerank.DIALECT: rerank.parse_rerank,
    tokenize.TOKENIZE: tokenize.parse_prompt,
    tokenize.DETOKENIZE: tokenize.parse_tokens,
    ollama.CHAT: ollama.parse_chat,
    ollama.GENERATE: ollama.parse_generate,
    ollama_embeddings.EMBED: ollama_embeddings.parse_embed,
    ollama_embeddings.EMBEDDINGS: ollama_embeddings.parse_embeddings,
    responses.DIALECT: responses.parse_response,
    responses.COUNT_DIALECT: responses.parse_count,
}

logger = logging.getLogger(__name__)


def answer(job: bytearray) -> bytearray:
    """The outcome of parsing a body, encoded."""
    try:
        return encode_outcome(_read(job))
    except Exception:
        logger.exception("the outcome of reading a body can't be encoded")
        return encode_outcome(InternalError("The server failed."))


def _read(body: bytearray) -> Outcome:
    try:
        job = take_job(body)
        return _PARSERS[job.dialect](body, job.context)
    except (RequestError, BytesNeeded, PagesNeeded, HistoryNeeded) as outcome:
        return outcome
    except MemoryError:
        return RequestTooCostly("The request can't be read: it takes too much memory.")
    except Exception:
        logger.exception("reading a body failed unexpectedly")
        return InternalError("The server failed.")


def main(memory_bytes: str, job_seconds: str) -> None:
    heap.keep_bodies()
    serve(answer, ChildLimits(int(memory_bytes), float(job_seconds), _RETIRE_BYTES))


if __name__ == "__main__":
    main(*sys.argv[1:])
