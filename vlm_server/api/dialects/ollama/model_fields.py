"""The fields `model` and `keep_alive`: a model's name, and how long it stays loaded.

`keep_alive` is a number of seconds or one of Go's durations, `5m` or `1h30m`; below 0 it means for
ever, and 0 unloads the model immediately: https://github.com/ollama/ollama/blob/main/docs/faq.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from vlm_server.api.parsing import json_body, served_models
from vlm_server.api.parsing.parsed_request import KnownModel
from vlm_server.errors import InvalidRequest, ModelNotFound
from vlm_server.settings import quantities

_LATEST = ":latest"
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?")
_MAX_CHARS = 64
_FOR_EVER = -1.0
_MAX_SECONDS = 10 * 365 * 86400.0


def with_tag(name: str) -> str:
    """`name` with a tag, which every listed model has."""
    return name if ":" in name else f"{name}{_LATEST}"


def model_wanted(name: str | None, known_models: Sequence[KnownModel]) -> KnownModel:
    """The model that `name` means, with or without a tag `latest`, or the only one.

    Raises ModelNotFound, and InvalidRequest for a missing name if there are several models, or for
    a lone surrogate, which answers could not repeat.
    """
    if not name:
        return served_models.only_model(known_models)
    json_body.utf8_length(name, "model")
    names = (name, name.removesuffix(_LATEST), with_tag(name))
    model = served_models.model_of(names, known_models)
    if model is None:
        shown_name, have = (
            json_body.shorten(name),
            "', '".join(model.name for model in known_models),
        )
        number = "one model" if len(known_models) == 1 else "the models"
        raise ModelNotFound(f"model '{shown_name}' not found, this server has {number}: '{have}'")
    return model


def keep_alive_seconds(keep_alive: float | str | None) -> float | None:
    """`keep_alive` in seconds, -1 for ever; None if it is not given. Raises InvalidRequest."""
    if keep_alive is None or keep_alive == "":
        return None
    seconds = _duration(keep_alive) if isinstance(keep_alive, str) else float(keep_alive)
    if seconds is None or math.isnan(seconds):
        raise InvalidRequest(
            "`keep_alive` must be a number of seconds, or a duration such as '5m'.", "keep_alive"
        )
    return _FOR_EVER if seconds < 0 or seconds > _MAX_SECONDS else seconds


def _duration(text: str) -> float | None:
    if len(text) > _MAX_CHARS:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    unsigned = text.removeprefix("-")
    try:
        seconds = quantities.seconds(unsigned)
    except ValueError:
        return None
    return seconds if unsigned == text else -seconds
