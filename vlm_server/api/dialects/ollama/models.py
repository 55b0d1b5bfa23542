"""Ollama's endpoints about models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`.

Routes that would add, change or delete models are refused.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlm_server import __version__
from vlm_server.api.dialects.ollama.model_fields import model_wanted, with_tag
from vlm_server.api.dialects.ollama.render import time_text
from vlm_server.api.http import access_log, body
from vlm_server.api.http.answer import json_response
from vlm_server.api.http.generation import Generation
from vlm_server.api.parsing import json_body, served_models
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.parsed_request import KnownModel
from vlm_server.errors import EngineUnavailable, InvalidRequest, NotSupported
from vlm_server.protocol import ModelFacts
from vlm_server.supervisor.engine_process.client import EngineStatus

API_VERSION = "0.12.11"
"""The version of Ollama with this API; clients check it against their minimum."""
_FOR_EVER = "9999-12-31T23:59:59Z"
_IN_USE = ("ready", "unresponsive", "unloading")
"""States of engines that hold a model."""
_CAPABILITIES = ("completion", "embedding", "vision", "tools", "thinking")
"""Capabilities that Ollama's clients know."""
_UNKNOWN_CAPABILITIES = ("completion", "vision")
"""Capabilities that a model is said to have before it was loaded."""
_QUANTIZATIONS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class ModelRequest(msgspec.Struct):
    """A request about a model: `name` is the older field."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class Catalog:
    """The endpoints about models, which need no engine."""

    def __init__(self, shared: Generation) -> None:
        self._shared = shared
        self._started_at = time.time()

    async def tags(self, _: Request) -> Response:
        tags = [
            _summary(status) | {"modified_at": self._modified_at(status.model_facts)}
            for status in self._statuses
        ]
        return json_response({"models": tags})

    async def show(self, request: Request) -> Response:
        _, model = await self._read(request, "stream")
        status = self._shared.models.status(model.name)
        facts = status.model_facts
        is_loading = not status.is_ready and status.state != "unloaded"
        if facts == ModelFacts() and is_loading:
            raise EngineUnavailable(f"The model is not loaded yet: {status.state}.")
        return json_response(
            {
                "modelfile": f"FROM {with_tag(model.name)}",
                "parameters": "",
                "template": _template(facts),
                "details": _details(status),
                "model_info": _model_info(facts),
                "capabilities": _capabilities(facts),
                "modified_at": self._modified_at(facts),
                "license": "",
            }
        )

    async def ps(self, _: Request) -> Response:
        loaded_statuses = [status for status in self._statuses if status.state in _IN_USE]
        return json_response({"models": [_running(status) for status in loaded_statuses]})

    async def version(self, _: Request) -> Response:
        return json_response({"version": API_VERSION, "vlm_server": __version__})

    async def pull(self, request: Request) -> Response:
        """Success without a download: served models are here, or come with their first request."""
        model_request, _ = await self._read(request)
        if model_request.stream is False:
            return json_response({"status": "success"})
        lines = b'{"status":"pulling manifest"}\n{"status":"success"}\n'
        return Response(lines, media_type="application/x-ndjson")

    async def refuse(self, request: Request) -> Response:
        """The answer of routes that would change models."""
        path = request.url.path
        raise NotSupported(
            f"{request.method} {path} is not supported: this server's models can't be changed here"
        )

    @property
    def _statuses(self) -> list[EngineStatus]:
        return served_models.statuses(self._shared.models)

    def _modified_at(self, facts: ModelFacts) -> str:
        return time_text(facts.modified_at or self._started_at)

    async def _read(
        self, request: Request, *without_effect: str
    ) -> tuple[ModelRequest, KnownModel]:
        """The body of `request`, and the model that it names. Raises RequestError.

        Unknown fields, and those `without_effect`, are reported.
        """
        shared = self._shared
        fields = await body.read_small(request, shared.limits, shared.arriving, any_type=True)
        model_request = json_body.convert(fields, ModelRequest, {})
        name = model_request.model or model_request.name
        if not name:
            raise InvalidRequest("`model` is missing.", "model")
        known_models = served_models.known_models(shared.models)
        model = model_wanted(name, known_models)
        ignored = IgnoredFields()
        ignored.add_unread(fields, model_request)
        ignored.add_given(fields, *without_effect)
        if name != model_request.name:
            ignored.add("name", model_request.name)
        access_log.entry_of(request.scope).ignored = ignored.names
        return model_request, model


def _summary(status: EngineStatus) -> dict[str, Any]:
    """A model's fields in all lists.

    `digest` has 64 hex digits, since clients truncate it: a hash of the name until the model's own
    is known.
    """
    facts, name = status.model_facts, with_tag(status.model_name)
    return {
        "name": name,
        "model": name,
        "size": facts.size_bytes,
        "digest": facts.digest or hashlib.sha256(status.model_name.encode()).hexdigest(),
        "details": _details(status),
    }


def _running(status: EngineStatus) -> dict[str, Any]:
    return _summary(status) | {
        "expires_at": _FOR_EVER if status.expires_at is None else time_text(status.expires_at),
        "size_vram": status.model_facts.size_bytes,
        "context_length": status.model_facts.context_tokens,
    }


def _details(status: EngineStatus) -> dict[str, Any]:
    """Family, size and kind of weights; empty texts where unknown. The base of an adapter."""
    facts = status.model_facts
    return {
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _parameter_size(facts.num_parameters),
        "quantization_level": _QUANTIZATIONS.get(facts.quantization, facts.quantization),
        "format": "safetensors",
        "parent_model": status.base or "",
    }


def _capabilities(facts: ModelFacts) -> tuple[str, ...]:
    """The model's capabilities that Ollama's clients know."""
    capabilities = facts.capabilities or _UNKNOWN_CAPABILITIES
    return tuple(name for name in _CAPABILITIES if name in capabilities)


def _model_info(facts: ModelFacts) -> dict[str, str | int]:
    """The figures whose names begin with the architecture, and the general ones."""
    if not facts.family:
        return {}
    return {
        "general.architecture": facts.family,
        "general.parameter_count": facts.num_parameters,
        f"{facts.family}.context_length": facts.context_tokens,
    }


def _template(facts: ModelFacts) -> str:
    """A template in Ollama's language, where some clients look for support of tools.

    Prompts are rendered by the checkpoint's own template.
    """
    capabilities = _capabilities(facts)
    tools = "{{ .Tools }}" if "tools" in capabilities else ""
    thinking = "{{ .Thinking }}" if "thinking" in capabilities else ""
    return f"{tools}{{{{ range .Messages }}}}{thinking}{{{{ .Content }}}}{{{{ end }}}}"


def _parameter_size(num_parameters: int) -> str:
    """A number of parameters as `3.8B` or `15.20M`; empty for none."""
    if num_parameters >= 1e9:
        return f"{num_parameters / 1e9:.1f}B"
    if num_parameters >= 1e6:
        return f"{num_parameters / 1e6:.2f}M"
    return f"{num_parameters / 1e3:.2f}K" if num_parameters else ""
