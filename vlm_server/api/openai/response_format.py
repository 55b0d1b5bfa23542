"""`response_format`: from the request's field to the JSON schema that constrains the answer.

Checks the schema's size and depth; the engine finds out whether it can be compiled.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from msgspec import Meta, Struct

from vlm_server.api.http.intake import json_body
from vlm_server.errors import InvalidRequest
from vlm_server.settings import Limits

MAX_SCHEMA_DEPTH = 64

_ANY_OBJECT = '{"type":"object"}'
_PARAM = "response_format.json_schema.schema"


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


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
            return _ANY_OBJECT
        case JsonSchemaFormat(json_schema=NamedSchema(schema=schema)):
            return _text(schema, limits.max_schema_bytes)
    return None


def _text(schema: dict[str, Any], max_bytes: int) -> str:
    """`schema` as JSON with its names in the client's order, which is the order in answers."""
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(
            f"The schema is nested more than {MAX_SCHEMA_DEPTH} levels deep.", _PARAM
        )
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidRequest("The schema contains a number that is too large.", _PARAM) from None
    if json_body.utf8_length(text, _PARAM) > max_bytes:
        raise InvalidRequest(f"At most {max_bytes} bytes of schema are allowed.", _PARAM)
    return text


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether objects and lists are nested more than `depth` levels deep in `value`."""
    level = [value]
    for _ in range(depth):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    """The objects and lists directly inside `value`."""
    inner = value.values() if isinstance(value, dict) else value
    return [each for each in inner if isinstance(each, dict | list)]
