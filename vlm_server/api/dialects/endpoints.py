"""The kinds of requests: each with its name, the beginning of its ids, its reader and renderer."""

from __future__ import annotations

import msgspec

from vlm_server.api.dialects.anthropic import parse as anthropic
from vlm_server.api.dialects.anthropic.render import MessageRenderer, encode_count
from vlm_server.api.dialects.ollama import parse as ollama
from vlm_server.api.dialects.ollama import render as ollama_render
from vlm_server.api.dialects.openai import completions, tokenize
from vlm_server.api.dialects.openai import parse as openai
from vlm_server.api.dialects.openai.render import ChatRenderer, CompletionRenderer
from vlm_server.api.dialects.responses import echo
from vlm_server.api.dialects.responses import parse as responses
from vlm_server.api.dialects.responses.render import ResponsesRenderer, encode_input_tokens
from vlm_server.api.dialects.responses.store import ResponseStore
from vlm_server.api.http.dialect import CountRenderer, Dialect, Renderer
from vlm_server.protocol import Finished
from vlm_server.supervisor.client import ModelClient

_decode = msgspec.msgpack.decode

CHAT_COMPLETIONS = Dialect(
    openai.DIALECT,
    "chatcmpl-",
    openai.read_chat,
    lambda id, model, options: ChatRenderer(id, model, _decode(options, type=openai.Options)),
)
COMPLETIONS = Dialect(
    completions.DIALECT,
    "cmpl-",
    completions.read,
    lambda id, model, options: CompletionRenderer(id, model, _decode(options, type=openai.Options)),
)
DETOKENIZE = Dialect(
    tokenize.DETOKENIZE,
    "detokenize-",
    tokenize.read_tokens,
    lambda id, model, options: CountRenderer(tokenize.encode_text),
)
MESSAGES = Dialect(
    anthropic.DIALECT,
    "msg_",
    anthropic.read_message,
    lambda id, model, options: MessageRenderer(id, model, _decode(options, type=anthropic.Options)),
)
COUNT_TOKENS = Dialect(
    anthropic.COUNT_DIALECT,
    "count_",
    anthropic.read_count,
    lambda id, model, options: CountRenderer(encode_count),
)
INPUT_TOKENS = Dialect(
    responses.COUNT_DIALECT,
    "count_",
    responses.read_count,
    lambda id, model, options: CountRenderer(encode_input_tokens),
)
OLLAMA_CHAT = Dialect(
    ollama.CHAT,
    "chat-",
    ollama.read_chat,
    lambda id, model, options: ollama_render.LineRenderer(
        _decode(options, type=ollama.AnswerOptions), ollama_render.as_message
    ),
    ollama_render.CONTENT_TYPE,
)
OLLAMA_GENERATE = Dialect(
    ollama.GENERATE,
    "gen-",
    ollama.read_generate,
    lambda id, model, options: ollama_render.LineRenderer(
        _decode(options, type=ollama.AnswerOptions), ollama_render.as_response
    ),
    ollama_render.CONTENT_TYPE,
)


def responses_of(store: ResponseStore) -> Dialect:
    """OpenAI's Responses, which go into `store`."""

    def renderer(request_id: str, model: str, options: bytes) -> Renderer:
        wishes = _decode(options, type=echo.Options)
        return ResponsesRenderer(request_id, model, wishes, store)

    return Dialect(responses.DIALECT, responses.ID_PREFIX, responses.read_response, renderer)


def tokenize_for(models: ModelClient) -> Dialect:
    """vLLM's `/tokenize`, which tells how many tokens one of `models` takes."""

    def renderer(request_id: str, model: str, options: bytes) -> Renderer:
        def encode(finished: Finished) -> bytes:
            context_tokens = models.status(model).model_facts.context_tokens
            return tokenize.encode_tokens(finished, context_tokens)

        return CountRenderer(encode)

    return Dialect(tokenize.TOKENIZE, "tokenize-", tokenize.read_prompt, renderer)
