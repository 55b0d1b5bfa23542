"""How Ollama's clients write the name of the model."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_server.api.http.intake import json_body
from vlm_server.api.http.intake.request_model import is_served_as
from vlm_server.errors import ModelNotFound

_LATEST = ":latest"


def tagged(name: str) -> str:
    """`name` with the tag that every model has in lists."""
    return name if ":" in name else f"{name}{_LATEST}"


def check(name: str, served: str, aliases: Sequence[str]) -> None:
    """Raises ModelNotFound unless `name`, with or without a tag `latest`, means `served`.

    Raises InvalidRequest for a lone surrogate, which answers could not repeat.
    """
    json_body.utf8_length(name, "model")
    names = (name, name.removesuffix(_LATEST), tagged(name))
    if not any(is_served_as(each, served, aliases) for each in names):
        shown = json_body.shown(name)
        raise ModelNotFound(f"model '{shown}' not found, this server has one model: '{served}'")
