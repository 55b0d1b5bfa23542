"""`response_format`: from the request's field to the JSON schema that constrains the answer."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from vlm_server.api.parsing.json_schema import ANY_OBJECT, schema_text
from vlm_server.api.parsing.leniency import IgnoredFields
from vlm_server.settings import Limits

_NAMED = "response_format.json_schema"
_PARAM = f"{_NAMED}.schema"


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    json_schema: None = None


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    json_schema: None = None


class NamedSchema(Struct, forbid_unknown_fields=True):
    """`name` and `description` have no effect; the schema is enforced, `strict` or not.

    See `ignore_labels`.
    """

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def read_schema(wanted: ResponseFormat | None, limits: Limits) -> str | None:
    """The JSON schema that the answer must match; None for free text. Raises InvalidRequest."""
    match wanted:
        case JsonObjectFormat():
            return ANY_OBJECT
        case JsonSchemaFormat(json_schema=NamedSchema(schema=schema)):
            return schema_text(schema, limits, _PARAM)
    return None


def ignore_labels(wanted: ResponseFormat | None, ignored: IgnoredFields) -> None:
    """What a schema has besides: the model is not told of it."""
    if isinstance(wanted, JsonSchemaFormat):
        labelled = wanted.json_schema
        ignored.add(f"{_NAMED}.name", labelled.name)
        ignored.add(f"{_NAMED}.description", labelled.description)
        if labelled.strict is False:
            ignored.add(f"{_NAMED}.strict")
