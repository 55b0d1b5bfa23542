"""JSON bodies parsed into structs, with errors that name the field at fault.

Stricter than most parsers: duplicate names, NaN and Infinity are errors, and so is more nesting,
more values or longer names than any request needs; values are counted before decoding.
msgspec decodes nearly every body, an image of 2 MiB in a third of the standard library's time. It
keeps the last of two values with the same name, so bodies that may have duplicate names, or that
msgspec refuses, are parsed by the standard library, which also says what is wrong. Messages quote
nothing of the client's but the beginning of an unknown field's name.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, get_args

import msgspec

from vlm_server.errors import InvalidRequest, UnsupportedField
from vlm_server.nearest import nearest

T = TypeVar("T", bound=msgspec.Struct)

MAX_DEPTH = 512
MAX_VALUES = 100_000
"""The most values in all objects and lists of a body."""
MAX_NAME_CHARS = 1024
SMALL_BYTES = 256 << 10
SMALL_VALUES = 5_000

Body = bytes | bytearray

_FEW = 500
"""Occurrences found one by one: in base64 ten times as fast as counting."""
_MAX_SHOWN_CHARS = 64
_MAX_EXPLAINED_CHARS = 512
"""More than the longest message and path of msgspec without a quoted value."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string; an unclosed one matches up to the end: retrying from each quote would take hours."""
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_INDEX = re.compile(r"\[[0-9]+\]")
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_ONLY_EMPTY = re.compile(r"^Expected (`null`, got|`array` of length <= 0)")


def is_small(body: Body) -> bool:
    """Whether `body` is parsed in about a millisecond, whatever it contains."""
    return len(body) <= SMALL_BYTES and _num_of(b"[{,", body) <= SMALL_VALUES


def parse_object(body: Body, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """The JSON object in `body`, of at most `max_values`. Raises InvalidRequest."""
    if not body:
        raise InvalidRequest("The request has no body.")
    _check_num_values(body, max_values)
    value = _parse(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The request's body must be a JSON object.")
    return value


def _parse(body: Body) -> Any:
    """The JSON value in `body`. Raises InvalidRequest."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = msgspec.json.decode(body)
        # Duplicate names that were dropped leave fewer quotation marks.
        if _num_quotes(value) == _num_of(b'"', body) and not _escapes_quotes(body):
            return value
        del value
    value = _parse_strictly(body)
    _num_quotes(value)  # for its checks
    return value


def _num_quotes(value: Any) -> int:
    """The number of quotation marks in the JSON of `value`, none of them written as `\\u0022`.

    Raises InvalidRequest for too much nesting or a name that is too long.
    """
    num = 0
    level: list[dict[str, Any] | list[Any]] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        inner = [item for container in level for item in _content(container)]
        strings = [item for item in inner if isinstance(item, str)]
        # Searching first takes a tenth of the time of counting.
        num += 2 * len(strings) + sum(text.count('"') for text in strings if '"' in text)
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return num
    raise _too_deep()


def _content(container: dict[str, Any] | list[Any]) -> list[Any]:
    """Names and values of an object, or the values of a list."""
    if isinstance(container, list):
        return container
    if any(len(name) > MAX_NAME_CHARS for name in container):
        raise UnsupportedField(
            f"The request's JSON has a name of more than {MAX_NAME_CHARS} characters."
        )
    return [*container, *container.values()]


def _escapes_quotes(body: Body) -> bool:
    """Whether `body` may have a quotation mark as `\\u0022`."""
    position = -2
    for _ in range(_FEW):
        position = body.find(b"\\", position + 2)
        if position < 0:
            return False
        if body.startswith(b"u0022", position + 1):
            return True
    return b"\\u0022" in body


def _parse_strictly(body: Body) -> Any:
    """The JSON value in `body`, by the standard library. Raises InvalidRequest."""
    try:
        return _decoder.decode(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidRequest("The request's body is not UTF-8.") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(
            f"The request's body is not valid JSON at {where}: {error.msg.removesuffix(' at')}."
        ) from None
    except ValueError:
        raise InvalidRequest("The request's body has a number with too many digits.") from None


def convert(fields: dict[str, Any], schema: type[T], rules: Mapping[str, str]) -> T:
    """`fields` as an instance of `schema`. Raises InvalidRequest or UnsupportedField.

    `rules` says what a field's value must be, by its path (`tools[].type`) or its name alone.
    """
    try:
        return msgspec.convert(fields, schema)
    except msgspec.ValidationError as error:
        raise _explain(str(error), rules, schema) from None
    except RecursionError:
        raise _too_deep() from None
    except UnicodeEncodeError:
        raise InvalidRequest("A string contains a lone surrogate.") from None


def utf8_length(text: str, param: str) -> int:
    """Length of `text` in bytes of UTF-8. Raises InvalidRequest for a lone surrogate."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{param}` contains a lone surrogate.", param) from None


def _check_num_values(body: Body, max_values: int) -> None:
    """Raises InvalidRequest for too many values, before they are decoded."""
    # Characters in strings are counted, too: an upper bound.
    if _num_of(b"[{,", body) <= max_values:
        return
    # Each string is a value or its name. The search stops one above the limit.
    bare, num_strings = _STRING.subn(b"", body, count=2 * max_values + 1)
    if num_strings > 2 * max_values or _num_of(b"[{,", bare) > max_values:
        raise InvalidRequest(f"The request's JSON has more than {max_values} values.")


def _num_of(characters: bytes, body: Body) -> int:
    return sum(_num_of_one(character, body) for character in characters)


def _num_of_one(character: int, body: Body) -> int:
    position = -1
    for num in range(_FEW):
        position = body.find(character, position + 1)
        if position < 0:
            return num
    return body.count(character)


def _too_deep() -> InvalidRequest:
    return InvalidRequest("The request's JSON is nested too deeply.")


def _explain(
    message: str, rules: Mapping[str, str], schema: type[msgspec.Struct]
) -> InvalidRequest:
    """msgspec's message as our error: `Expected ... - at `$.a[0].b`` gives param `a[0].b`."""
    text, path = _text_and_path(message)
    if unknown := _UNKNOWN.match(text):
        param = _join(path, shorten(unknown[1]))
        close = nearest(unknown[1][:_MAX_SHOWN_CHARS], _names_at(path, schema))
        hint = f": did you mean `{_join(path, close)}`?" if close else "."
        return UnsupportedField(f"`{param}` is not a field of this request{hint}", param)
    if match := _MISSING.match(text):
        param = _join(path, match[1])
        return InvalidRequest(f"`{param}` is missing.", param)
    if _ONLY_EMPTY.match(text):
        return UnsupportedField(f"`{path}` is not supported; leave it out.", path)
    if text.startswith("Invalid"):  # the message quotes the value
        name = path.rpartition(".")[2]
        kind = _INDEX.sub("[]", path)
        rule = rules.get(kind) or rules.get(name, "has a value that is not allowed")
        return InvalidRequest(f"`{path}` {rule}.", path)
    return InvalidRequest(f"`{path}`: {text[:1].lower()}{text[1:]}.", path or None)


def _names_at(path: str, schema: type[msgspec.Struct]) -> set[str]:
    """The fields that objects at `path` may have, in a body that `schema` describes."""
    kinds = [schema]
    for step in _INDEX.sub("", path).split(".") if path else ():
        fields = [field for kind in kinds for field in msgspec.structs.fields(kind)]
        types = [field.type for field in fields if field.encode_name == step]
        kinds = [kind for each in types for kind in _structs_in(each)]
    return {name for kind in kinds for name in kind.__struct_encode_fields__}


def _structs_in(kind: Any) -> list[type[msgspec.Struct]]:
    """The structs in the type of a field: in a union, in a list, or annotated."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for inner in get_args(kind) for struct in _structs_in(inner)]


def _text_and_path(message: str) -> tuple[str, str]:
    """The text of msgspec's message, without most of a value that it quotes, and its path."""
    if len(message) > _MAX_EXPLAINED_CHARS:
        half = _MAX_EXPLAINED_CHARS // 2
        message = f"{message[:half]}...{message[-half:]}"
    message = message.replace(" - at `key` in `$", " - at `$")
    text, separator, path = message.rpartition(" - at `$")
    if not separator:
        return message, ""
    # msgspec writes `map[...]` for any value of a map.
    return text, path.removesuffix("`").removesuffix("[...]").removeprefix(".")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shorten(name: str) -> str:
    """The beginning of a name from the client, made safe for a message."""
    printable = "".join(c if c.isprintable() and c != "`" else "?" for c in name[:_MAX_SHOWN_CHARS])
    return printable if len(name) <= _MAX_SHOWN_CHARS else printable + "..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = shorten(next(name for name, count in counts.items() if count > 1))
        raise InvalidRequest(f"The request's JSON has a duplicate name in an object: `{twice}`.")
    return fields


def _refuse_constant(_: str) -> NoReturn:
    raise InvalidRequest("The request's JSON contains NaN or Infinity, which are not valid JSON.")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)
