"""How Ollama's clients write the name of a model."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_server.api.parsing import json_body, served_models
from vlm_server.api.parsing.parsed_request import KnownModel
from vlm_server.errors import ModelNotFound

_LATEST = ":latest"


def tagged(name: str) -> str:
    """`name` with the tag that every model has in lists."""
    return name if ":" in name else f"{name}{_LATEST}"


def model_wanted(name: str | None, known: Sequence[KnownModel]) -> KnownModel:
    """The model that `name` means, with or without a tag `latest`, or the only one.

    Raises ModelNotFound if it means none, InvalidRequest for no name where there are several
    models, and for a lone surrogate, which answers could not repeat.
    """
    if not name:
        return served_models.assumed(known)
    json_body.utf8_length(name, "model")
    names = (name, name.removesuffix(_LATEST), tagged(name))
    model = served_models.model_of(names, known)
    if model is None:
        shown, have = json_body.shown(name), "', '".join(one.name for one in known)
        number = "one model" if len(known) == 1 else "the models"
        raise ModelNotFound(f"model '{shown}' not found, this server has {number}: '{have}'")
    return model
