"""The names that the one model answers to, and what a request for it gets by default."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from vlm_server.api.http.intake import json_body
from vlm_server.api.http.intake.calls import Context
from vlm_server.errors import ModelNotFound
from vlm_server.settings import Limits

_MAX_NAME_CHARS = 256


def check_model(name: str, context: Context) -> None:
    """Raises ModelNotFound unless `name` is one of the model's; see `is_served_as`.

    Raises InvalidRequest for a lone surrogate, which answers could not repeat.
    """
    json_body.utf8_length(name, "model")
    if not is_served_as(name, context.model, context.model_aliases):
        raise ModelNotFound(
            f"This server has one model: `{context.model}`. It answers to other names by the "
            "setting server.model_aliases.",
            "model",
        )


def is_served_as(name: str, model: str, aliases: Sequence[str]) -> bool:
    """Whether `name` means `model`: its own name, `default`, or what one of `aliases` matches."""
    if name in (model, "default"):
        return True
    return len(name) <= _MAX_NAME_CHARS and any(fnmatchcase(name, alias) for alias in aliases)


def max_tokens_or_default(wanted: int | None, limits: Limits, min_tokens: int = 0) -> int | None:
    """How long an answer may get; None is as long as the context has room for.

    One that has to be longer than the default may be so long.
    """
    if wanted is not None or not limits.default_max_tokens:
        return wanted
    return max(limits.default_max_tokens, min_tokens)
