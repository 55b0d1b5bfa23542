"""How Ollama's clients write the name of the model."""

from __future__ import annotations

from vlm_server.api.http.intake import json_body
from vlm_server.errors import ModelNotFound

_LATEST = ":latest"


def tagged(name: str) -> str:
    """`name` with the tag that every model has in lists."""
    return name if ":" in name else f"{name}{_LATEST}"


def check(name: str, served: str) -> None:
    """Raises ModelNotFound unless `name`, with or without a tag `latest`, is that of `served`."""
    if name.removesuffix(_LATEST) not in (served.removesuffix(_LATEST), "default"):
        shown = json_body.shown(name)
        raise ModelNotFound(f"model '{shown}' not found, this server has one model: '{served}'")
