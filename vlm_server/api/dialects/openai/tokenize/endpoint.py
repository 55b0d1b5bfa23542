"""`POST /v1/tokenize` and `POST /v1/detokenize`: prompts as tokens and back, without an answer."""

from __future__ import annotations

from functools import partial

import msgspec

from vlm_server.api.dialects.openai.tokenize import intake
from vlm_server.api.http import sse
from vlm_server.api.http.dialect import CountRenderer
from vlm_server.protocol import Finished, ImageUse
from vlm_server.supervisor.client import ModelClient


class Tokenized(msgspec.Struct, frozen=True):
    """As vLLM has it; `images` and `cached_tokens` are ours."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    images: tuple[ImageUse, ...]
    cached_tokens: int
    token_strs: None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


_encode = msgspec.json.Encoder().encode


class Tokenize:
    """A prompt's tokens, as a `Dialect`."""

    name = intake.TOKENIZE
    id_prefix = "tokenize-"
    content_type = sse.CONTENT_TYPE
    read_text = staticmethod(intake.read_prompt_text)

    def __init__(self, models: ModelClient) -> None:
        self._models = models

    def renderer(self, request_id: str, model: str, options: bytes) -> CountRenderer:
        """See `Dialect.renderer`."""
        return CountRenderer(partial(self._encode, model))

    def _encode(self, model: str, finished: Finished) -> bytes:
        usage = finished.usage
        max_model_len = self._models.status(model).model_facts.context_tokens
        return _encode(
            Tokenized(
                count=usage.prompt_tokens,
                max_model_len=max_model_len,
                tokens=finished.token_ids,
                images=finished.images,
                cached_tokens=usage.cached_tokens,
            )
        )


class Detokenize:
    """The text of tokens, as a `Dialect`."""

    name = intake.DETOKENIZE
    id_prefix = "detokenize-"
    content_type = sse.CONTENT_TYPE
    read_text = staticmethod(intake.read_tokens)

    def renderer(self, request_id: str, model: str, options: bytes) -> CountRenderer:
        """See `Dialect.renderer`."""
        return CountRenderer(lambda finished: _encode(Detokenized(finished.text)))
