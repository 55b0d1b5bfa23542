"""Parameters of answers that people set by name: their ranges, and their fields in a request."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_server.errors import ConfigError
from vlm_server.nearest import did_you_mean

_MAX_TOKENS = 2**31 - 1
_UNSET = ("off", "default", "none", "unset")
EFFORTS = ("none", "minimal", "low", "medium", "high")
ParameterValue = float | int | str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number from `low` to `high`, of the type of `low`, and what it does."""

    low: float | int
    high: float | int
    purpose: str


PARAMETERS = {
    "max_tokens": Parameter(1, _MAX_TOKENS, "longest answer, in tokens"),
    "temperature": Parameter(0.0, 2.0, "0: always the likeliest token; higher: more variety"),
    "top_p": Parameter(0.0, 1.0, "only the likeliest tokens that make up this probability"),
    "top_k": Parameter(-1, _MAX_TOKENS, "only this many of the likeliest tokens"),
    "min_p": Parameter(0.0, 1.0, "only tokens this likely, compared with the likeliest"),
    "repetition_penalty": Parameter(0.0, 2.0, "above 1: fewer repetitions"),
    "presence_penalty": Parameter(-2.0, 2.0, "above 0: fewer words again"),
    "frequency_penalty": Parameter(-2.0, 2.0, "above 0: fewer words often"),
    "seed": Parameter(-(2**63), 2**63 - 1, "the same seed, the same answer"),
}
REASONING = "reasoning"
"""Not a number: one of `EFFORTS`."""
NAMES = (*PARAMETERS, REASONING)


def parse(name: str, text: str) -> ParameterValue | None:
    """The value of a parameter; None for the model's own. Raises ConfigError."""
    if name == REASONING:
        if text.lower() not in (*EFFORTS, *_UNSET):
            raise ConfigError(f"reasoning is one of {', '.join(EFFORTS)}, not {text!r}")
        return "none" if text.lower() in ("off", "none") else _unless_unset(text.lower())
    if name not in PARAMETERS:
        close = did_you_mean(name, NAMES) or f"; there are {', '.join(NAMES)}"
        raise ConfigError(f"there is no parameter {name!r}{close}")
    if text.lower() in _UNSET:
        return None
    parameter = PARAMETERS[name]
    try:
        number = type(parameter.low)(text)
    except ValueError:
        kind = "whole number" if isinstance(parameter.low, int) else "number"
        raise ConfigError(f"{name} is a {kind}, not {text!r}") from None
    if not parameter.low <= number <= parameter.high:
        raise ConfigError(f"{name} is from {parameter.low} to {parameter.high}, not {text}")
    return number


def fields(values: dict[str, ParameterValue]) -> dict[str, ParameterValue]:
    """The fields of a request."""
    return {"reasoning_effort" if name == REASONING else name: values[name] for name in values}


def _unless_unset(text: str) -> str | None:
    return None if text in _UNSET else text
