"""`/v1/models` with the one model, and a start page for browsers."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from vlm_server.errors import ModelNotFound
from vlm_server.supervisor.client import EngineClient

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

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def retrieve(self, request: Request) -> Response:
        name = self._engine.status.model_name
        if request.path_params["model"] not in (name, "default"):
            raise ModelNotFound(f"This server has one model: `{name}`.", "model")
        return JSONResponse(self._model())

    async def page(self, request: Request) -> Response:
        status = self._engine.status
        url = str(request.base_url).rstrip("/")
        return PlainTextResponse(_PAGE.format(model=status.model_name, state=status.state, url=url))

    def _model(self) -> dict[str, Any]:
        name = self._engine.status.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vlm_server",
        }
