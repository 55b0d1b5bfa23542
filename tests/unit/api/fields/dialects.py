"""All dialects, in the order of the columns of `docs/fields.md`."""

from __future__ import annotations

from tests.unit.api.fields import (
    anthropic_fields,
    count_fields,
    ollama_fields,
    openai_fields,
    responses_fields,
    text_fields,
    vector_fields,
)
from tests.unit.api.fields.field import Dialect

ANSWERING: tuple[Dialect, ...] = (
    openai_fields.CHAT,
    text_fields.COMPLETIONS,
    responses_fields.RESPONSES,
    anthropic_fields.MESSAGE,
    ollama_fields.CHAT,
    ollama_fields.GENERATE,
)
COUNTING: tuple[Dialect, ...] = (
    count_fields.TOKENIZE,
    count_fields.DETOKENIZE,
    anthropic_fields.COUNT_TOKENS,
)
POOLING: tuple[Dialect, ...] = (
    vector_fields.EMBEDDINGS,
    vector_fields.RERANK,
    vector_fields.DECISIONS,
    vector_fields.OLLAMA_EMBED,
    vector_fields.OLLAMA_EMBEDDINGS,
)
DIALECTS = (*ANSWERING, *COUNTING, *POOLING)
