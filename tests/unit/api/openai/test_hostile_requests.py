"""Requests that are nearly right are taken, or refused by a short message in OpenAI's shape."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.api.requests import PNG_URL, chat, picture, text, user
from vlm_server.api.http import openai_errors as errors
from vlm_server.api.http.intake.calls import (
    Context,
    KnownModel,
    ParsedRequest,
    call_of,
    decode_outcome,
    encode_outcome,
)
from vlm_server.api.openai.intake import read_chat, read_text
from vlm_server.api.openai.schema import HARMLESS, NEUTRAL, ChatRequest
from vlm_server.errors import RequestError
from vlm_server.protocol import MESSAGE_HEADER, decode_command, encode_message
from vlm_server.settings import Limits

CONTEXT = Context((KnownModel("demo"),), "chatcmpl-1", "salt", "", Limits())
MAX_MESSAGE_CHARS = 300
FIELDS = [field.name for field in msgspec.structs.fields(ChatRequest)]

WORD = st.text(max_size=12) | st.sampled_from(["user", "text", "image_url", "\ud800", "`", PNG_URL])
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
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=8,
)
PART = st.sampled_from([text(), picture(), {"type": "text"}]) | st.fixed_dictionaries(
    {"type": WORD}, optional={"text": ANYTHING, "image_url": ANYTHING, "video_url": ANYTHING}
)
CALL = st.fixed_dictionaries(
    {"id": st.just("1"), "type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": WORD, "arguments": ANYTHING})},
)
CONTENT = st.lists(PART, max_size=3) | ANYTHING
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "robot"]), "content": CONTENT},
    optional={
        "name": ANYTHING,
        "tool_calls": st.lists(CALL, max_size=3) | ANYTHING,
        "tool_call_id": st.just("1") | ANYTHING,
        "x" * 900: ANYTHING,
    },
)
REQUEST = st.fixed_dictionaries(
    {"model": st.just("demo") | WORD, "messages": st.lists(MESSAGE, max_size=3) | ANYTHING},
    optional={
        name: ANYTHING
        for name in [*FIELDS, *HARMLESS, *NEUTRAL, "more"]
        if name not in ("model", "messages")
    },
)


def check(body: bytes) -> ParsedRequest | RequestError:
    """What `body` is read as; both ways to the front must agree."""
    try:
        parsed = read_chat(body, CONTEXT)
    except RequestError as error:
        return checked(error)
    at_once, by_process = call_of(parsed), decode_outcome(encode_outcome(parsed))
    assert at_once.summary == by_process.summary
    frames = [encode_message(call.request.submit) for call in (at_once, by_process)]
    assert decode_command(frames[0][MESSAGE_HEADER.size :]) == parsed.submit
    assert decode_command(frames[1][MESSAGE_HEADER.size :]) == parsed.submit
    assert ", ".join(parsed.ignored).isascii()
    return parsed


def checked(error: RequestError) -> RequestError:
    assert error.status in (400, 404, 413)
    shown = json.loads(errors.encode(error))["error"]
    assert len(shown["message"]) < MAX_MESSAGE_CHARS
    assert len(shown["param"] or "") < MAX_MESSAGE_CHARS
    with pytest.raises(type(error)) as caught:
        decode_outcome(encode_outcome(error))
    assert (caught.value.message, caught.value.param) == (error.message, error.param)
    return error


@settings(max_examples=100, derandomize=True)
@given(REQUEST)
def test_nearly_right_requests_are_taken_or_refused(request: dict[str, Any]) -> None:
    check(json.dumps(request).encode())


@settings(max_examples=50, derandomize=True)
@given(REQUEST)
def test_unknown_fields_that_are_ignored_do_no_harm(request: dict[str, Any]) -> None:
    context = msgspec.structs.replace(CONTEXT, unknown_fields="ignore")
    with contextlib.suppress(RequestError):
        ignored = read_chat(json.dumps(request).encode(), context).ignored
        assert ", ".join(ignored).isascii()


@settings(max_examples=150, derandomize=True)
@given(
    st.sampled_from([name for name in FIELDS if name not in ("model", "messages")]),
    ANYTHING,
)
def test_one_odd_field_is_taken_or_refused(name: str, value: Any) -> None:
    check(json.dumps(chat(**{name: value})).encode())


@settings(max_examples=100, derandomize=True)
@given(st.data())
def test_a_request_with_bytes_changed_is_taken_or_refused(data: st.DataObject) -> None:
    body = bytearray(json.dumps(chat(user(text(), picture()))).encode())
    places = st.integers(0, len(body) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        body[place] = data.draw(st.integers(0, 255))
    check(bytes(body))


def test_text_is_told_from_media() -> None:
    assert read_text(json.dumps(chat(user(text(), picture()))).encode(), CONTEXT) is None
    parsed = read_text(json.dumps(chat(user(text()))).encode(), CONTEXT)
    assert parsed == read_chat(json.dumps(chat(user(text()))).encode(), CONTEXT)


@pytest.mark.parametrize(
    "value",
    ["s" * 100_000, "`" * 5000, " - at `$.messages[0]`" * 500, "\ud800" * 500],
    ids=["long", "quotes", "paths", "surrogates"],
)
@pytest.mark.parametrize("name", ["role", "content", "type", "name"])
def test_no_message_repeats_a_value(name: str, value: str) -> None:
    message: dict[str, Any] = {"role": "user", "content": [text()]}
    target = message["content"][0] if name == "type" else message
    target[name] = value
    outcome = check(json.dumps(chat(message)).encode())
    if isinstance(outcome, RequestError):
        assert value[:50] not in outcome.message
