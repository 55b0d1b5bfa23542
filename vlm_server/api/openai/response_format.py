"""`response_format`: from the request's field to the JSON schema that constrains the answer."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from vlm_server.api.http.intake.json_schema import ANY_OBJECT, schema_text
from vlm_server.settings import Limits

_PARAM = "response_format.json_schema.schema"


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    json_schema: None = None


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    json_schema: None = None


class NamedSchema(Struct, forbid_unknown_fields=True):
    """`name` and `description` have no effect; the schema is enforced, `strict` or not."""

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
