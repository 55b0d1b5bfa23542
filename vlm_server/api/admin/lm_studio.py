"""`/api/v0/models`: the models as LM Studio lists its own; read only.

Clients that know LM Studio ask it which models see pictures and call tools, and how much fits.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vlm_server.api.parsing import served_models
from vlm_server.errors import ModelNotFound
from vlm_server.settings import Server
from vlm_server.supervisor.client import EngineStatus, ModelClient


class LmStudioModels:
    """LM Studio's two routes about models."""

    def __init__(self, models: ModelClient, server: Server) -> None:
        self._models = models
        self._server = server

    async def list(self, _: Request) -> Response:
        models = [_model(status) for status in served_models.statuses(self._models)]
        return JSONResponse({"object": "list", "data": models})

    async def retrieve(self, request: Request) -> Response:
        known = served_models.known_models(self._models, self._server)
        model = served_models.model_of(request.path_params["model"], known)
        if model is None:
            raise ModelNotFound(served_models.listed(known), "model")
        return JSONResponse(_model(self._models.status(model.name)))


def _model(status: EngineStatus) -> dict[str, Any]:
    facts = status.model_facts
    can_use_tools = "tools" in facts.capabilities
    return {
        "id": status.model_name,
        "object": "model",
        "type": "vlm",
        "publisher": "vlm_server",
        "arch": facts.family,
        "compatibility_type": "mlx",
        "quantization": facts.quantization,
        "state": "loaded" if status.is_ready else "not-loaded",
        "max_context_length": facts.context_tokens,
        "loaded_context_length": facts.context_tokens,
        "capabilities": ["tool_use"] if can_use_tools else [],
    }
