"""`/v1/models` with the one model, and a start page for browsers."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from vlm_server.api.http.intake.request_model import is_served_as
from vlm_server.errors import ModelNotFound
from vlm_server.protocol import ModelFacts
from vlm_server.settings import Settings
from vlm_server.supervisor.client import EngineClient

_IMAGE_FORMATS = ("png", "jpeg", "webp", "gif")
_PAGE = """\
vlm_server: a vision-language model on this machine, served over OpenAI's API.

model     {model}
state     {state}
base URL  {url}/v1

For clients that look for "Ollama is running": this is not Ollama, but its API is at {url}/api.

Ask about an image:

curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d @- <<END
{{"model": "default", "messages": [{{"role": "user", "content": [
  {{"type": "image_url", "image_url":
    {{"url": "data:image/png;base64,$(base64 < picture.png | tr -d '\\n')"}}}},
  {{"type": "text", "text": "What is in this image?"}}]}}]}}
END

Also: {url}/v1/models  {url}/v1/status  {url}/metrics  {url}/health/ready
"""


class Models:
    """The endpoints about the model."""

    def __init__(self, engine: EngineClient, settings: Settings) -> None:
        self._engine = engine
        self._limits = settings.limits
        self._aliases = settings.server.model_aliases
        self._max_pixels = settings.image.max_pixels
        self._started = int(time.time())

    async def list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def retrieve(self, request: Request) -> Response:
        name = self._engine.status.model_name
        if not is_served_as(request.path_params["model"], name, self._aliases):
            raise ModelNotFound(f"This server has one model: `{name}`.", "model")
        return JSONResponse(self._model())

    async def page(self, request: Request) -> Response:
        status = self._engine.status
        url = str(request.base_url).rstrip("/")
        return PlainTextResponse(_PAGE.format(model=status.model_name, state=status.state, url=url))

    def _model(self) -> dict[str, Any]:
        """OpenAI's four fields, vLLM's `max_model_len`, and what agents look for.

        Before the first engine is ready nobody knows more than the name.
        """
        status = self._engine.status
        facts, limits = status.model_facts, self._limits
        model: dict[str, Any] = {
            "id": status.model_name,
            "object": "model",
            "created": int(facts.modified_at) or self._started,
            "owned_by": "vlm_server",
        }
        if not facts.family:
            return model
        return model | {
            "family": facts.family,
            "max_model_len": facts.context_tokens,
            "num_parameters": facts.num_parameters,
            "quantization": facts.quantization,
            "modalities": {"input": ["text", "image", "video"], "output": ["text"]},
            "capabilities": list(facts.capabilities),
            "coordinates": facts.coordinates or None,
            **({"warnings": list(facts.warnings)} if facts.warnings else {}),
            "image_limits": {
                "max_images": limits.max_images,
                "max_image_bytes": limits.max_image_bytes,
                "max_image_pixels": limits.max_image_pixels,
                "formats": list(_IMAGE_FORMATS),
                "seen": self._seen(facts),
            },
        }

    def _seen(self, facts: ModelFacts) -> dict[str, int] | None:
        """The sizes at which the model sees pictures, for families that scale them."""
        if not facts.image_side_multiple:
            return None
        return {
            "min_pixels": facts.min_image_pixels,
            "max_pixels": min(facts.max_image_pixels, self._max_pixels or facts.max_image_pixels),
            "side_multiple": facts.image_side_multiple,
        }
