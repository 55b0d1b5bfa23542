"""`POST /api/generate`."""

from __future__ import annotations

from vlm_server.api.dialects.ollama.intake import GENERATE, read_generate_text
from vlm_server.api.dialects.ollama.options import decode_options
from vlm_server.api.dialects.ollama.render import CONTENT_TYPE, LineRenderer, as_response


class Generate:
    """Ollama's generate, as a `Dialect`."""

    name = GENERATE
    id_prefix = "gen-"
    content_type = CONTENT_TYPE
    read_text = staticmethod(read_generate_text)

    def renderer(self, request_id: str, model: str, options: bytes) -> LineRenderer:
        """See `Dialect.renderer`. Answers have no id, and the model's name as the client has it."""
        return LineRenderer(decode_options(options), as_response)
