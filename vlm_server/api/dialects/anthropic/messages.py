"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from vlm_server.api.dialects.anthropic.intake import (
    COUNT_DIALECT,
    DIALECT,
    read_count_text,
    read_text,
)
from vlm_server.api.dialects.anthropic.options import decode_options
from vlm_server.api.dialects.anthropic.render import MessageRenderer, encode_count
from vlm_server.api.http import sse
from vlm_server.api.http.dialect import CountRenderer

PATH = "/v1/messages"


class Messages:
    """Anthropic's messages, as a `Dialect`."""

    name = DIALECT
    id_prefix = "msg_"
    content_type = sse.CONTENT_TYPE
    read_text = staticmethod(read_text)

    def renderer(self, request_id: str, model: str, options: bytes) -> MessageRenderer:
        """See `Dialect.renderer`."""
        return MessageRenderer(request_id, model, decode_options(options))


class CountTokens:
    """The tokens of a message's prompt, as a `Dialect`: it generates nothing."""

    name = COUNT_DIALECT
    id_prefix = "count_"
    content_type = sse.CONTENT_TYPE
    read_text = staticmethod(read_count_text)

    def renderer(self, request_id: str, model: str, options: bytes) -> CountRenderer:
        """See `Dialect.renderer`."""
        return CountRenderer(encode_count)
