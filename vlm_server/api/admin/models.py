"""The served models, as OpenAI, Anthropic and LM Studio list them; the start page for terminals."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from vlm_server import __version__
from vlm_server.api.http.dialect import is_anthropics
from vlm_server.api.parsing import served_models
from vlm_server.api.parsing.media import image_header
from vlm_server.protocol import ModelFacts
from vlm_server.settings import Settings
from vlm_server.supervisor.engine_process.client import EngineStatus, ModelClient

_PAGE = """\
vlm_server: a vision-language model on this machine, served over OpenAI's API.

{models}
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
    """The endpoints about models. LM Studio's list vision and tool calls as capabilities."""

    def __init__(self, models: ModelClient, settings: Settings) -> None:
        self._models = models
        self._settings = settings
        self._started_at = int(time.time())

    async def list(self, request: Request) -> Response:
        statuses = served_models.statuses(self._models)
        models = [self._model_json(status, request) for status in statuses]
        model_list: dict[str, Any] = {"object": "list", "data": models}
        if is_anthropics(request.headers):
            ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
            model_list |= {"has_more": False, **ends}
        return JSONResponse(model_list)

    async def retrieve(self, request: Request) -> Response:
        return JSONResponse(self._model_json(self._model_in_path(request), request))

    async def lm_studio_list(self, _: Request) -> Response:
        models = [_lm_studio_model(status) for status in served_models.statuses(self._models)]
        return JSONResponse({"object": "list", "data": models})

    async def lm_studio_retrieve(self, request: Request) -> Response:
        return JSONResponse(_lm_studio_model(self._model_in_path(request)))

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def page(self, request: Request) -> Response:
        url = str(request.base_url).rstrip("/")
        statuses = served_models.statuses(self._models)
        lines = "\n".join(f"model     {status.model_name} ({status.state})" for status in statuses)
        return PlainTextResponse(_PAGE.format(models=lines, url=url))

    def _model_in_path(self, request: Request) -> EngineStatus:
        """The model that the path of `request` names. Raises ModelNotFound."""
        known_models = served_models.known_models(self._models)
        return self._models.status(
            served_models.find_model(request.path_params["model"], known_models).name
        )

    def _model_json(self, status: EngineStatus, request: Request) -> dict[str, Any]:
        """The JSON of a model, with Anthropic's fields for its clients."""
        model = self._openai_model(status)
        if not is_anthropics(request.headers):
            return model
        created = datetime.fromtimestamp(model["created"], UTC).isoformat()
        return {**model, "type": "model", "display_name": model["id"], "created_at": created}

    def _openai_model(self, status: EngineStatus) -> dict[str, Any]:
        """OpenAI's four fields and, once the model has been loaded, fields that agents look for."""
        facts = status.model_facts
        model: dict[str, Any] = {
            "id": status.model_name,
            "object": "model",
            "created": int(facts.modified_at) or self._started_at,
            "owned_by": "vlm_server",
            "root": Path(status.adapter).name if status.adapter else status.model_name,
            "parent": status.base,
            "state": status.state,
        }
        if (progress := served_models.progress_of(status)) is not None:
            model["progress"] = progress
        if not facts.family:
            return model
        return model | {
            "family": facts.family,
            "max_model_len": facts.context_tokens,
            "num_parameters": facts.num_parameters,
            "quantization": facts.quantization,
            "modalities": {
                "input": ["text", "image", "video"] if facts.reads_images else ["text"],
                "output": ["embeddings" if facts.vector_dimensions else "text"],
            },
            "capabilities": list(facts.capabilities),
            "coordinates": facts.coordinates or None,
            **({"dimensions": facts.vector_dimensions} if facts.vector_dimensions else {}),
            **({"warnings": list(facts.warnings)} if facts.warnings else {}),
            "image_limits": self._image_limits(facts) if facts.reads_images else None,
        }

    def _image_limits(self, facts: ModelFacts) -> dict[str, Any]:
        limits = self._settings.limits
        return {
            "max_images": limits.max_images,
            "max_image_bytes": limits.max_image_bytes,
            "max_image_pixels": limits.max_image_pixels,
            "formats": [name.lower() for name in image_header.READABLE],
            "seen": self._pixel_limits(facts),
        }

    def _pixel_limits(self, facts: ModelFacts) -> dict[str, int] | None:
        """The sizes at which the model sees images, for families that scale them."""
        if not facts.image_side_multiple:
            return None
        max_pixels = self._settings.image.max_pixels or facts.max_image_pixels
        return {
            "min_pixels": facts.min_image_pixels,
            "max_pixels": min(facts.max_image_pixels, max_pixels),
            "side_multiple": facts.image_side_multiple,
        }


def _lm_studio_type(facts: ModelFacts) -> str:
    if facts.vector_dimensions:
        return "embeddings"
    return "vlm" if facts.reads_images else "llm"


def _lm_studio_model(status: EngineStatus) -> dict[str, Any]:
    facts = status.model_facts
    can_use_tools = "tools" in facts.capabilities
    return {
        "id": status.model_name,
        "object": "model",
        "type": _lm_studio_type(facts),
        "publisher": "vlm_server",
        "arch": facts.family,
        "compatibility_type": "mlx",
        "quantization": facts.quantization,
        "state": "loaded" if status.is_ready else "not-loaded",
        "max_context_length": facts.context_tokens,
        "loaded_context_length": facts.context_tokens,
        "capabilities": ["tool_use"] if can_use_tools else [],
    }
