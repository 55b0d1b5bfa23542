"""`/api/v0/models`: the one model as LM Studio lists its own; read only.

Clients that know LM Studio ask it which models see pictures and call tools, and how much fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vlm_server.api.http.intake.request_model import is_served_as
from vlm_server.errors import ModelNotFound
from vlm_server.supervisor.client import EngineClient


class LmStudioModels:
    """LM Studio's two routes about models."""

    def __init__(self, engine: EngineClient, aliases: Sequence[str]) -> None:
        self._engine = engine
        self._aliases = aliases

    async def list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def retrieve(self, request: Request) -> Response:
        name = self._engine.status.model_name
        if not is_served_as(request.path_params["model"], name, self._aliases):
            raise ModelNotFound(f"This server has one model: `{name}`.", "model")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        status = self._engine.status
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
