"""`POST /v1/chat/completions`."""

from __future__ import annotations

from vlm_server.api.dialects.openai.intake import DIALECT, read_text
from vlm_server.api.dialects.openai.options import decode_options
from vlm_server.api.dialects.openai.render import ChatRenderer
from vlm_server.api.http import sse


class ChatCompletions:
    """OpenAI's chat completions, as a `Dialect`."""

    name = DIALECT
    id_prefix = "chatcmpl-"
    content_type = sse.CONTENT_TYPE
    read_text = staticmethod(read_text)

    def renderer(self, request_id: str, model: str, options: bytes) -> ChatRenderer:
        """See `Dialect.renderer`."""
        return ChatRenderer(request_id, model, decode_options(options))
