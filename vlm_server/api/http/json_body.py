"""Parses JSON into structs, with errors that name the field at fault.

Stricter than most parsers: duplicate names, NaN and Infinity are errors. No message repeats what
the client sent, except for the name of an unknown field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from vlm_server.errors import InvalidRequest, UnsupportedField

T = TypeVar("T")

_MAX_NAME_CHARS = 64
_AT_PATH = re.compile(
    r"^(?P<text>.*?)(?: - at `\$\.?(?P<path>[^`]*?)(?:\[\.\.\.\])?`)?$", re.DOTALL
)
"""msgspec writes `map[...]` for any value of a map."""
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_ONLY_EMPTY = re.compile(r"^Expected (`null`, got|`array` of length <= 0)")


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequest."""
    try:
        value = _decoder.decode(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidRequest("The request's body is not UTF-8.") from None
    except RecursionError:
        raise InvalidRequest("The request's JSON is nested too deeply.") from None
    except ValueError:
        raise InvalidRequest("The request's body is not valid JSON.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request's body must be a JSON object.")
    return value


def convert(fields: dict[str, Any], schema: type[T], rules: Mapping[str, str]) -> T:
    """`fields` as a `schema`. Raises InvalidRequest, or UnsupportedField for unknown names.

    `rules` says what a field's value must be, by the field's path or its name alone.
    """
    try:
        return msgspec.convert(fields, schema)
    except msgspec.ValidationError as error:
        raise _explain(str(error), rules) from None
    except UnicodeEncodeError:
        raise InvalidRequest("A string contains a lone surrogate.") from None


def utf8_length(text: str, param: str) -> int:
    """Length of `text` in bytes of UTF-8. Raises InvalidRequest for a lone surrogate."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{param}` contains a lone surrogate.", param) from None


def _explain(message: str, rules: Mapping[str, str]) -> InvalidRequest:
    """msgspec's message as our error: `Expected ... - at `$.a[0].b`` gives param `a[0].b`."""
    match = _AT_PATH.match(message)
    text, path = (match["text"], match["path"] or "") if match else (message, "")
    if unknown := _UNKNOWN.match(text):
        param = _join(path, _shown(unknown[1]))
        return UnsupportedField(f"`{param}` is not a field of this request.", param)
    if missing := _MISSING.match(text):
        param = _join(path, missing[1])
        return InvalidRequest(f"`{param}` is missing.", param)
    if _ONLY_EMPTY.match(text):
        return UnsupportedField(f"`{path}` is not supported; leave it out.", path)
    if text.startswith("Invalid"):  # it quotes the value
        name = path.rpartition(".")[2]
        rule = rules.get(path) or rules.get(name, "has a value that is not allowed")
        return InvalidRequest(f"`{path}` {rule}.", path)
    return InvalidRequest(f"`{path}`: {text[:1].lower()}{text[1:]}.", path or None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(name: str) -> str:
    """A name from the client, made safe for a message."""
    printable = "".join(c if c.isprintable() and c != "`" else "?" for c in name)
    return printable if len(printable) <= _MAX_NAME_CHARS else printable[:_MAX_NAME_CHARS] + "..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise InvalidRequest("The request's JSON has a duplicate name in an object.")
    return fields


def _refuse_constant(_: str) -> NoReturn:
    raise InvalidRequest("The request's JSON contains NaN or Infinity, which are not valid JSON.")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)
