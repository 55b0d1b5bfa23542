"""The kinds of requests: name, prefix of ids, parser and renderer of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vlm_server.api.dialects.anthropic import parse as anthropic
from vlm_server.api.dialects.anthropic.render import MessageRenderer, encode_count
from vlm_server.api.dialects.ollama import embeddings as ollama_embeddings
from vlm_server.api.dialects.ollama import parse as ollama
from vlm_server.api.dialects.ollama import render as ollama_render
from vlm_server.api.dialects.openai import completions, decisions, embeddings, rerank, tokenize
from vlm_server.api.dialects.openai import parse as openai
from vlm_server.api.dialects.openai.render import ChatRenderer, CompletionRenderer
from vlm_server.api.dialects.responses import parse as responses
from vlm_server.api.dialects.responses.render import ResponsesRenderer, encode_input_tokens
from vlm_server.api.dialects.responses.store import ResponseStore
from vlm_server.api.http.dialect import Dialect, Renderer, WordlessRenderer
from vlm_server.protocol import Finished
from vlm_server.supervisor.engine_process.client import ModelClient

_MakeRenderer = Callable[[str, str, bytes], Renderer]


def _count_renderer(encode: Callable[[Finished], bytes]) -> _MakeRenderer:
    """The renderer of requests to count tokens."""
    return lambda *_: WordlessRenderer(encode)


def _wordless(encode: Callable[[str, str, bytes, Finished], bytes]) -> _MakeRenderer:
    """The renderer of requests for vectors, scores or decisions."""
    return lambda *request: WordlessRenderer(partial(encode, *request))


CHAT_COMPLETIONS = Dialect(openai.DIALECT, "chatcmpl-", openai.parse_chat, ChatRenderer)
COMPLETIONS = Dialect(
    completions.DIALECT, "cmpl-", completions.parse_completion, CompletionRenderer
)
EMBEDDINGS = Dialect(
    embeddings.DIALECT,
    "embd-",
    embeddings.parse_embeddings,
    _wordless(embeddings.encode_embeddings),
)
RERANK = Dialect(rerank.DIALECT, "rerank-", rerank.parse_rerank, _wordless(rerank.encode_ranking))
DECISIONS = Dialect(
    decisions.DIALECT, "decision-", decisions.parse_decisions, _wordless(decisions.encode_decisions)
)
DETOKENIZE = Dialect(
    tokenize.DETOKENIZE, "detokenize-", tokenize.parse_tokens, _count_renderer(tokenize.encode_text)
)
MESSAGES = Dialect(anthropic.DIALECT, "msg_", anthropic.parse_message, MessageRenderer)
COUNT_TOKENS = Dialect(
    anthropic.COUNT_DIALECT, "count_", anthropic.parse_count, _count_renderer(encode_count)
)
INPUT_TOKENS = Dialect(
    responses.COUNT_DIALECT, "count_", responses.parse_count, _count_renderer(encode_input_tokens)
)
OLLAMA_CHAT = Dialect(
    ollama.CHAT,
    "chat-",
    ollama.parse_chat,
    partial(ollama_render.LineRenderer, ollama_render.chat_fields),
    ollama_render.CONTENT_TYPE,
)
OLLAMA_GENERATE = Dialect(
    ollama.GENERATE,
    "gen-",
    ollama.parse_generate,
    partial(ollama_render.LineRenderer, ollama_render.generate_fields),
    ollama_render.CONTENT_TYPE,
)

OLLAMA_EMBED = Dialect(
    ollama_embeddings.EMBED,
    "embd-",
    ollama_embeddings.parse_embed,
    _wordless(ollama_embeddings.encode_embed),
)
OLLAMA_EMBEDDINGS = Dialect(
    ollama_embeddings.EMBEDDINGS,
    "embd-",
    ollama_embeddings.parse_embeddings,
    _count_renderer(ollama_embeddings.encode_embeddings),
)


def responses_of(store: ResponseStore) -> Dialect:
    """OpenAI's Responses, kept in `store`."""
    renderer = partial(ResponsesRenderer, store)
    return Dialect(responses.DIALECT, responses.ID_PREFIX, responses.parse_response, renderer)


def tokenize_for(models: ModelClient) -> Dialect:
    """vLLM's `/tokenize`, which also returns the context length of the model."""

    def renderer(request_id: str, model: str, options: bytes) -> Renderer:
        def encode(finished: Finished) -> bytes:
            context_tokens = models.status(model).model_facts.context_tokens
            return tokenize.encode_tokens(finished, context_tokens)

        return WordlessRenderer(encode)

    return Dialect(tokenize.TOKENIZE, "tokenize-", tokenize.parse_prompt, renderer)
