"""Fields that all dialects have: the model, the length of the answer, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from vlm_server.api.parsing import json_body, served_models
from vlm_server.api.parsing.calls import Context, KnownModel
from vlm_server.errors import InvalidRequest, ModelNotFound
from vlm_server.settings import Limits

StopString = Annotated[str, Meta(min_length=1, max_length=256)]


def model_wanted(name: str | None, context: Context) -> KnownModel:
    """The model that `name` means, or the only one. Raises ModelNotFound if it means none.

    Raises InvalidRequest for no name where there are several models, and for a lone surrogate,
    which answers could not repeat.
    """
    if not name:
        return served_models.assumed(context.models)
    json_body.utf8_length(name, "model")
    model = served_models.model_of(name, context.models)
    if model is None:
        raise ModelNotFound(
            f"{served_models.listed(context.models)} The setting server.model_aliases gives more "
            "names to the first.",
            "model",
        )
    return model


def max_tokens_or_default(wanted: int | None, limits: Limits, min_tokens: int = 0) -> int | None:
    """How long an answer may get; None is as long as the context has room for.

    One that has to be longer than the default may be so long.
    """
    if wanted is not None or not limits.default_max_tokens:
        return wanted
    return max(limits.default_max_tokens, min_tokens)


def stop_strings(wanted: str | Sequence[str] | None, param: str, limits: Limits) -> tuple[str, ...]:
    """The strings that end an answer, which the field `param` has. Raises InvalidRequest."""
    strings = (wanted,) if isinstance(wanted, str) else tuple(wanted or ())
    if len(strings) > limits.max_stop_strings:
        message = f"At most {limits.max_stop_strings} stop strings are allowed"
        raise InvalidRequest(f"{message} (limits.max_stop_strings).", param)
    for string in strings:
        json_body.utf8_length(string, param)
    return strings
