"""JSON schemas in requests: their size and depth. The engine finds out whether they compile."""

from __future__ import annotations

import json
from typing import Any

from vlm_server.api.parsing import json_body
from vlm_server.errors import InvalidRequest
from vlm_server.settings import Limits

MAX_SCHEMA_DEPTH = 64
ANY_OBJECT = '{"type":"object"}'


def schema_text(schema: dict[str, Any], limits: Limits, param: str) -> str:
    """`schema` as JSON, its names in the client's order as in answers. Raises InvalidRequest."""
    limit = limits.max_schema_bytes
    return json_text(schema, param, limit, "schema", "limits.max_schema_bytes")


def json_text(
    value: dict[str, Any], param: str, max_bytes: int, noun: str, setting: str | None = None
) -> str:
    """`value`, a `noun`, as JSON of at most `max_bytes`, a limit that `setting` sets.

    Raises InvalidRequest, naming `param`, also for too much nesting.
    """
    if _is_deeper(value, MAX_SCHEMA_DEPTH):
        message = f"The {noun} is nested more than {MAX_SCHEMA_DEPTH} levels deep."
        raise InvalidRequest(message, param)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidRequest(f"The {noun} contains a number that is too large.", param) from None
    if json_body.utf8_length(text, param) > max_bytes:
        where = f" ({setting})" if setting else ""
        raise InvalidRequest(f"At most {max_bytes} bytes of {noun} are allowed{where}.", param)
    return text


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    """The objects and lists directly inside `value`."""
    inner = value.values() if isinstance(value, dict) else value
    return [child for child in inner if isinstance(child, dict | list)]
