"""The fields of the form of an upload, and their bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import prepare
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.ignored_fields import IgnoredFields, known_fields
from vlm_server.errors import InvalidRequest

MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 2_592_000
"""The bounds of `expires_after` that OpenAI documents."""
_SECONDS = "expires_after[seconds]"
_RULES = {
    "purpose": "must be 'assistants', 'batch', 'user_data' or 'vision'",
    "expires_after[anchor]": "must be 'created_at'",
}
_NUMBER = re.compile(r"[0-9]{1,9}")
_FileBytes = Annotated[
    str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})
]


class AnthropicForm(Struct):
    """Anthropic's form. `file` stands for its part, whose bytes are on disk."""

    file: _FileBytes


class OpenAIForm(Struct, forbid_unknown_fields=True):
    """OpenAI's form. `file` stands for its part, whose bytes are on disk."""

    file: _FileBytes
    purpose: Literal["assistants", "batch", "user_data", "vision"]
    anchor: Literal["created_at"] | None = msgspec.field(name="expires_after[anchor]", default=None)
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)] | None = (
        msgspec.field(name=_SECONDS, default=None)
    )


prepare(AnthropicForm, OpenAIForm)


def parse(
    fields: Mapping[str, str], filename: str, ignored: IgnoredFields, *, refuses: bool
) -> OpenAIForm:
    """OpenAI's form. If the server `refuses` unknown fields, they are refused by name.

    Raises InvalidRequest and UnsupportedField.
    """
    values: dict[str, Any] = {**fields, "file": filename}
    if _NUMBER.fullmatch(fields.get(_SECONDS, "")):
        values[_SECONDS] = int(fields[_SECONDS])
    known = known_fields(values, OpenAIForm, ignored, refuses=refuses)
    form = json_body.convert(known, OpenAIForm, _RULES)
    if (form.anchor is None) != (form.seconds is None):
        raise InvalidRequest("`expires_after` needs `anchor` and `seconds`.", "expires_after")
    return form
