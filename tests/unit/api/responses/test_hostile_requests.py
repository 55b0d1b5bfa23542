"""Requests that are nearly right are taken, or refused by a short message in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.api.requests import PNG_URL
from tests.unit.api.responses.requests import asking, tool, user
from vlm_server.api.http import openai_errors as errors
from vlm_server.api.http.intake.calls import (
    Context,
    KnownModel,
    ParsedRequest,
    call_of,
    decode_outcome,
    encode_outcome,
)
from vlm_server.api.http.intake.history import HistoryNeeded
from vlm_server.api.responses import items
from vlm_server.api.responses.intake import read_response
from vlm_server.api.responses.options import decode_options
from vlm_server.api.responses.schema import HARMLESS, NEUTRAL, ResponsesRequest
from vlm_server.errors import RequestError
from vlm_server.settings import Limits

CONTEXT = Context((KnownModel("demo"),), "resp_1", "salt", "", Limits())
MAX_MESSAGE_CHARS = 300
FIELDS = [field.name for field in msgspec.structs.fields(ResponsesRequest)]
NAMES = [
    *("type", "role", "content", "output", "call_id", "name", "arguments", "id", "status"),
    *("text", "image_url", "summary", "format", "schema", "mode", "tools", "effort", "phase"),
]
TYPES = [
    *("message", "function_call", "function_call_output", "reasoning", "input_text", "refusal"),
    *("input_image", "output_text", "reasoning_text", "function", "allowed_tools", "json_schema"),
    *sorted(items.UNSUPPORTED_ITEMS | items.UNSUPPORTED_PARTS),
]

WORD = st.text(max_size=12) | st.sampled_from(["user", "\ud800", "`", PNG_URL, "{}", *TYPES])
NAME = st.sampled_from(NAMES) | WORD
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | WORD
    | st.just("s" * 5000)
)
ANYTHING = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=4),
    max_leaves=8,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES)},
    optional=dict.fromkeys(("text", "refusal", "image_url", "detail", "annotations"), ANYTHING),
)
CONTENT = st.lists(PART, max_size=3) | ANYTHING
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES) | ANYTHING,
        "role": st.sampled_from(["user", "assistant", "developer"]) | ANYTHING,
        "content": CONTENT,
        "output": CONTENT,
        "call_id": WORD,
        "name": WORD,
        "arguments": WORD,
        "id": ANYTHING,
        "x" * 900: ANYTHING,
    },
)
REQUEST = st.fixed_dictionaries(
    {"model": st.just("demo"), "input": st.lists(ITEM, max_size=4) | ANYTHING},
    optional={
        name: ANYTHING
        for name in [*FIELDS, *sorted(HARMLESS), *NEUTRAL, "more"]
        if name not in ("model", "input")
    },
)


def check(body: bytes) -> None:
    """What `body` is read as can be sent, written and told."""
    try:
        parsed = read_response(body, CONTEXT)
    except HistoryNeeded as needed:
        encode_outcome(needed)
    except RequestError as error:
        check_refusal(error)
    else:
        check_parsed(parsed)


def check_refusal(error: RequestError) -> None:
    assert error.status in (400, 404, 413)
    shown = json.loads(errors.encode(error))["error"]
    assert len(shown["message"]) < MAX_MESSAGE_CHARS
    assert len(shown["param"] or "") < MAX_MESSAGE_CHARS


def check_parsed(parsed: ParsedRequest) -> None:
    assert decode_outcome(encode_outcome(parsed)).summary == call_of(parsed).summary
    options = decode_options(parsed.options)
    json.loads(options.echo)
    if options.items:
        again = msgspec.structs.replace(CONTEXT, previous=(options.items,))
        more = asking([user("U")], previous_response_id="r", instructions=None)
        read_response(json.dumps(more).encode(), again)
    assert all(name.isascii() and name.isprintable() for name in parsed.ignored)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(REQUEST)
def test_nearly_right_requests_are_taken_or_refused(request: dict[str, Any]) -> None:
    check(json.dumps(request).encode())


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(ITEM, min_size=1, max_size=3))
def test_odd_items_are_taken_or_refused(given: list[dict[str, Any]]) -> None:
    check(json.dumps(asking([user("U"), *given, user("U")])).encode())


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.sampled_from([*(set(FIELDS) - {"model"}), *HARMLESS, *NEUTRAL]), ANYTHING)
def test_one_odd_field_is_taken_or_refused(name: str, value: Any) -> None:
    check(json.dumps(asking(tools=[tool("a")]) | {name: value}).encode())


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.data())
def test_a_request_with_bytes_changed_is_taken_or_refused(data: st.DataObject) -> None:
    picture = {"type": "input_image", "image_url": PNG_URL}
    body = bytearray(json.dumps(asking([user(picture)], tools=[tool("a")])).encode())
    places = st.integers(0, len(body) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        body[place] = data.draw(st.integers(0, 255))
    check(bytes(body))
