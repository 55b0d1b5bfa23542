"""Calls in a conversation's history, as every dialect reads them."""

from __future__ import annotations

import json
from typing import Any

from vlm_server.api.parsing import json_body
from vlm_server.errors import InvalidRequest


def object_text(arguments: str | dict[str, Any], param: str) -> str:
    """The arguments of a call as the JSON of an object, which chat templates need.

    A call that was cut off has text that is none; the model sees that text as the argument
    `arguments`, rather than the conversation being refused for ever. Raises InvalidRequest for
    what can't be written as JSON, or as UTF-8 once its escapes are read.
    """
    if isinstance(arguments, dict):
        return _dumped(arguments, param)
    if not arguments.strip():
        return "{}"
    json_body.utf8_length(arguments, param)
    try:
        given = json_body.parse_object(arguments.encode())
    except InvalidRequest:
        return _dumped({"arguments": arguments}, param)
    _dumped(given, param)
    return arguments


def _dumped(arguments: dict[str, Any], param: str) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"`{param}` has a number that is too large.", param) from None
    json_body.utf8_length(text, param)
    return text
