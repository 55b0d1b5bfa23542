"""Fields that all dialects have: the model, the answer's length and stop strings, constraints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from vlm_server.api.parsing import json_body, served_models
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.parsed_request import Context, KnownModel
from vlm_server.errors import InvalidRequest, ModelNotFound
from vlm_server.protocol import Tools
from vlm_server.settings import Limits

StopString = Annotated[str, Meta(min_length=1, max_length=256)]


def model_wanted(name: str | None, context: Context) -> KnownModel:
    """The model that `name` means, or the only one. Raises ModelNotFound and InvalidRequest."""
    if not name:
        return served_models.only_model(context.models)
    json_body.utf8_length(name, "model")
    model = served_models.model_of(name, context.models)
    if model is None:
        raise ModelNotFound(
            f"{served_models.describe_models(context.models)} The setting model.aliases "
            "gives more names to the first.",
            "model",
        )
    return model


def max_tokens_or_default(
    max_tokens: int | None, limits: Limits, min_tokens: int = 0
) -> int | None:
    """The limit on an answer's tokens, by default at least `min_tokens`; None is unlimited."""
    if max_tokens is not None or not limits.default_max_tokens:
        return max_tokens
    return max(limits.default_max_tokens, min_tokens)


def stop_strings(stop: str | Sequence[str] | None, param: str, limits: Limits) -> tuple[str, ...]:
    """The stop strings in the field `param`. Raises InvalidRequest."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > limits.max_stop_strings:
        message = f"At most {limits.max_stop_strings} stop strings are allowed"
        raise InvalidRequest(f"{message} (limits.max_stop_strings).", param)
    for string in strings:
        json_body.utf8_length(string, param)
    return strings


class ConstraintFields(NamedTuple):
    """A dialect's names of fields; `continued` is that of continuing the last message."""

    schema: str
    continued: str
    calls: str = "tool_choice"


def must_call(tools: Tools | None) -> bool:
    """Whether the answer is tool calls only, without text."""
    return tools is not None and tools.choice == "required"


def check_constraints(
    tools: Tools | None,
    json_schema: str | None,
    fields: ConstraintFields,
    ignored: IgnoredFields,
    *,
    continues: bool,
) -> str | None:
    """The JSON schema that the answer has to match; one rule for all dialects.

    Required calls have no text: the schema is ignored, as by OpenAI. Raises InvalidRequest for a
    constrained answer that `continues` a message, since grammars start at the beginning.
    """
    is_required = must_call(tools)
    if is_required and json_schema is not None:
        ignored.add(fields.schema, True)
        json_schema = None
    if continues and (is_required or json_schema is not None):
        constraint = fields.calls if is_required else fields.schema
        raise InvalidRequest(
            f"An answer that goes on where the assistant's last message ends (`{fields.continued}`)"
            f" can't be combined with `{constraint}`, which makes it begin anew.",
            fields.continued,
        )
    return json_schema
