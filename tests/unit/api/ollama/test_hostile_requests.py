"""Requests that are nearly right are taken, or refused by a short message in Ollama's shape."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.media.pictures import encoded
from vlm_server.api.http.intake.calls import (
    Context,
    KnownModel,
    ParsedRequest,
    Read,
    call_of,
    decode_outcome,
    encode_outcome,
)
from vlm_server.api.ollama import errors
from vlm_server.api.ollama.intake import (
    read_chat,
    read_chat_text,
    read_generate,
    read_generate_text,
)
from vlm_server.api.ollama.schema import (
    ChatMessage,
    ModelOptions,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from vlm_server.errors import RequestError
from vlm_server.protocol import MESSAGE_HEADER, decode_command, encode_message
from vlm_server.settings import Limits

CONTEXT = Context((KnownModel("demo"),), "chat-1", "salt", "", Limits())
PNG = base64.b64encode(encoded("PNG")).decode()
MAX_MESSAGE_CHARS = 600

WORD = st.text(max_size=12) | st.sampled_from(["user", "json", "low", "\ud800", "`", PNG])
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


def optional(struct: type[msgspec.Struct], *but: str) -> dict[str, st.SearchStrategy[Any]]:
    return {name: ANYTHING for name in struct.__struct_fields__ if name not in but}


FUNCTION = st.fixed_dictionaries({"name": WORD}, optional={"arguments": ANYTHING, "x": ANYTHING})
CALL = st.fixed_dictionaries({"function": FUNCTION}, optional={"id": WORD})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"])},
    optional={
        **optional(ChatMessage, "role", "content"),
        "content": WORD,
        "images": st.lists(WORD, max_size=2),
        "tool_calls": st.lists(CALL, max_size=2),
        "x" * 900: ANYTHING,
    },
)
OPTIONS = st.fixed_dictionaries({}, optional={**optional(ModelOptions), "num_ctx": ANYTHING})
CHAT = st.fixed_dictionaries(
    {"model": st.just("demo") | WORD, "messages": st.lists(MESSAGE, max_size=3) | ANYTHING},
    optional={**optional(OllamaChatRequest, "model", "messages", "options"), "options": OPTIONS},
)
GENERATE = st.fixed_dictionaries(
    {"model": st.just("demo"), "prompt": WORD},
    optional={**optional(OllamaGenerateRequest, "model", "prompt", "options"), "options": OPTIONS},
)


def check(read: Read, body: bytes) -> None:
    """Both ways to the front must agree on what `body` is read as."""
    try:
        parsed = read(body, CONTEXT)
    except RequestError as error:
        check_refusal(error)
        return
    assert isinstance(parsed, ParsedRequest)
    at_once, by_process = call_of(parsed), decode_outcome(encode_outcome(parsed))
    assert at_once.summary == by_process.summary
    ", ".join(parsed.ignored).encode("ascii")
    for call in (at_once, by_process):
        frame = encode_message(call.request.submit)
        assert decode_command(frame[MESSAGE_HEADER.size :]) == parsed.submit


def check_refusal(error: RequestError) -> None:
    assert error.status in (400, 404, 413)
    (message,) = json.loads(errors.encode(error)).values()
    assert len(message) < MAX_MESSAGE_CHARS


@settings(max_examples=200, derandomize=True)
@given(CHAT)
def test_nearly_right_chats_are_taken_or_refused(request: dict[str, Any]) -> None:
    check(read_chat, json.dumps(request).encode())


@settings(max_examples=200, derandomize=True)
@given(GENERATE)
def test_nearly_right_prompts_are_taken_or_refused(request: dict[str, Any]) -> None:
    check(read_generate, json.dumps(request).encode())


def test_text_is_told_from_pictures() -> None:
    message = {"role": "user", "content": "hi"}
    chat = json.dumps({"model": "demo", "messages": [message]}).encode()
    assert read_chat_text(chat, CONTEXT) == read_chat(chat, CONTEXT)
    generate = json.dumps({"model": "demo", "prompt": "hi"}).encode()
    assert read_generate_text(generate, CONTEXT) == read_generate(generate, CONTEXT)
    chat = json.dumps({"model": "demo", "messages": [{**message, "images": [PNG]}]}).encode()
    assert read_chat_text(chat, CONTEXT) is None
    generate = json.dumps({"model": "demo", "prompt": "hi", "images": [PNG]}).encode()
    assert read_generate_text(generate, CONTEXT) is None


@pytest.mark.parametrize("value", ["s" * 100_000, "`" * 5000, "\ud800" * 500])
@pytest.mark.parametrize("name", ["role", "content", "tool_name"])
def test_no_message_repeats_a_value(name: str, value: str) -> None:
    message = {"role": "tool", "content": "x", name: value}
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}, message]}
    check(read_chat, json.dumps(body).encode())


PROGRAM = """
import sys, threading
from vlm_server.api.ollama import schema

sys.setswitchinterval(1e-6)
fields = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
go = threading.Barrier(4)

def parse():
    go.wait()
    schema.convert(fields, schema.OllamaChatRequest)

threads = [threading.Thread(target=parse) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_the_first_two_requests_at_once_do_not_crash_the_front():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
