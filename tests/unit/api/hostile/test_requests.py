"""Any request is accepted, or refused by a short message of its dialect."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.whole_run import examples
from tests.unit.api.dialects.responses.requests import asking
from tests.unit.api.hostile.dialects import DIALECTS, Hostile, Json
from tests.unit.api.requests import user
from vlm_server.api.dialects.responses.echo import Options
from vlm_server.api.parsing.conversation import NeedsProcess
from vlm_server.api.parsing.media.external import BytesNeeded
from vlm_server.api.parsing.parsed_request import (
    Context,
    HistoryNeeded,
    KnownModel,
    ParsedRequest,
    decode_outcome,
    encode_outcome,
    encode_request,
)
from vlm_server.errors import RequestError
from vlm_server.protocol import MESSAGE_HEADER, decode_command, encode_message
from vlm_server.settings import Limits

CONTEXT = Context((KnownModel("demo"),), "id-1", "salt", "", Limits())
ODD: list[Any] = [
    None, True, -1, 0, 10**400, 1e300, "", "\ud800", "data:", [], [[]], [None], {},
    {"type": "text"}, {"type": []}, {"": {}},
]  # fmt: skip
LONG = ["s" * 100_000, "`" * 5000, " - at `$.messages[0]`" * 500, "\ud800" * 500]
NAMES = {"model", "tool_choice"}
"""Where there is a name that nothing has, which the message repeats as far as it is short."""
Path = tuple[str | int, ...]
Outcome = ParsedRequest | RequestError | None

by_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)


# ---- checks of an outcome ------------------------------------------------------------


def check(dialect: Hostile, body: bytes, context: Context = CONTEXT) -> Outcome:
    """The parsed request or the error; None if parsing needs more bytes or the history."""
    try:
        parsed = dialect.parse(body, context)
    except (BytesNeeded, HistoryNeeded) as needed:
        encode_outcome(needed)
        return None
    except RequestError as error:
        return refused(dialect, error)
    return accepted(dialect, parsed)


def accepted(dialect: Hostile, parsed: ParsedRequest) -> ParsedRequest:
    """Assert that both encodings of a parsed request agree; return it."""
    assert isinstance(parsed, ParsedRequest)
    at_once, by_process = encode_request(parsed), decode_outcome(encode_outcome(parsed))
    assert at_once.summary == by_process.summary
    for call in (at_once, by_process):
        frame = encode_message(call.request.submit)
        assert decode_command(frame[MESSAGE_HEADER.size :]) == parsed.submit
    assert all(name.isascii() and name.isprintable() for name in parsed.ignored)
    if dialect.name == "responses":
        check_stored_turn_continues(dialect, parsed)
    return parsed


def check_stored_turn_continues(dialect: Hostile, parsed: ParsedRequest) -> None:
    """Assert that the stored turn is JSON and that a later turn can continue it."""
    options = msgspec.msgpack.decode(parsed.options, type=Options)
    json.loads(options.echo)
    if options.items:
        more = asking([user("U")], previous_response_id="r", instructions=None)
        context = msgspec.structs.replace(CONTEXT, previous=(options.items,))
        dialect.parse(json.dumps(more).encode(), context)


def refused(dialect: Hostile, error: RequestError) -> RequestError:
    assert error.status in (400, 404, 413)
    shown = json.loads(dialect.encode_error(error))["error"]
    texts = [shown] if isinstance(shown, str) else [shown["message"], shown["param"] or ""]
    for text in texts:
        assert len(text) < dialect.longest
        assert "\ud800" not in text
    with pytest.raises(type(error)) as caught:
        decode_outcome(encode_outcome(error))
    assert (caught.value.message, caught.value.param) == (error.message, error.param)
    return error


# ---- one place at a time -------------------------------------------------------------


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(inner, (*path, key))


def changed(body: Json, path: Path, value: Any) -> bytes:
    body = copy.deepcopy(body)
    *way, last = path
    place: Any = body
    for key in way:
        place = place[key]
    place[last] = value
    return json.dumps(body).encode()


@by_dialect
async def test_odd_value_anywhere_is_accepted_or_refused(
    client: httpx.AsyncClient, dialect: Hostile
) -> None:
    """Accepted requests are also answered."""
    assert isinstance(check(dialect, json.dumps(dialect.whole).encode()), ParsedRequest)
    for path in paths(dialect.whole):
        for odd in ODD:
            body = changed(dialect.whole, path, odd)
            with at(path, odd):
                outcome = check(dialect, body)
                if isinstance(outcome, ParsedRequest) and not outcome.stream:
                    answer = await client.post(dialect.route, content=body, headers=JSON)
                    assert answer.status_code == 200, answer.text


JSON = {"content-type": "application/json"}


@contextlib.contextmanager
def at(path: Path, value: Any) -> Iterator[None]:
    """Name the failing path and value."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{value!r:.40} at {path}") from error


@by_dialect
def test_refusals_do_not_repeat_value(dialect: Hostile) -> None:
    for path in paths(dialect.whole):
        for value in LONG:
            with at(path, value):
                outcome = check(dialect, changed(dialect.whole, path, value))
                if isinstance(outcome, RequestError) and path[0] not in NAMES:
                    assert value[:50] not in outcome.message


# ---- random requests -----------------------------------------------------------------


@by_dialect
@settings(max_examples=examples(200), derandomize=True)
@given(data=st.data())
def test_nearly_right_requests_are_accepted_or_refused(
    dialect: Hostile, data: st.DataObject
) -> None:
    check(dialect, json.dumps(data.draw(dialect.requests)).encode())


@by_dialect
@settings(derandomize=True)
@given(data=st.data())
def test_odd_field_is_accepted_or_refused(dialect: Hostile, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(dialect.fields))
    check(dialect, json.dumps(dialect.plain | {field: data.draw(dialect.anything)}).encode())


@by_dialect
@settings(max_examples=25, derandomize=True)
@given(data=st.data())
def test_ignored_unknown_fields_cause_no_error(dialect: Hostile, data: st.DataObject) -> None:
    context = msgspec.structs.replace(CONTEXT, unknown_fields="ignore")
    check(dialect, json.dumps(data.draw(dialect.requests)).encode(), context)


@by_dialect
@settings(derandomize=True)
@given(data=st.data())
def test_request_with_changed_bytes_is_accepted_or_refused(
    dialect: Hostile, data: st.DataObject
) -> None:
    body = bytearray(json.dumps(dialect.with_image or dialect.plain).encode())
    places = st.integers(0, len(body) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        body[place] = data.draw(st.integers(0, 255))
    check(dialect, bytes(body))


# ---- parsing threads -----------------------------------------------------------------


@pytest.mark.parametrize("dialect", [each for each in DIALECTS if each.with_image], ids=str)
def test_parsing_thread_accepts_texts_and_leaves_images(dialect: Hostile) -> None:
    text, with_image = (json.dumps(each).encode() for each in (dialect.plain, dialect.with_image))
    on_thread = msgspec.structs.replace(CONTEXT, on_thread=True)
    assert dialect.parse(text, on_thread) == dialect.parse(text, CONTEXT)
    assert dialect.parse(with_image, CONTEXT).submit.images
    with pytest.raises(NeedsProcess):
        dialect.parse(with_image, on_thread)


PROGRAM = """
import json, sys, threading
from importlib import import_module
from vlm_server.api.parsing.parsed_request import Context, KnownModel
from vlm_server.settings import Limits
from tests.support.whole_run import examples

sys.setswitchinterval(1e-6)
context = Context((KnownModel("demo"),), "id-1", "salt", "", Limits())

def read(dialect, body, go):
    go.wait()
    dialect(body, context)

for module, name, body in json.loads(sys.argv[1]):
    go, dialect = threading.Barrier(4), getattr(import_module(module), name)
    threads = [threading.Thread(target=read, args=(dialect, body.encode(), go)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print("all read")
"""


def test_concurrent_first_requests_do_not_crash_front() -> None:
    jobs = [
        (dialect.parse.__module__, dialect.parse.__qualname__, json.dumps(dialect.plain))
        for dialect in DIALECTS
    ]
    command = [sys.executable, "-c", PROGRAM, json.dumps(jobs)]
    for _ in range(3):
        ended = subprocess.run(command, capture_output=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (0, b"all read\n"), ended.stderr
        assert not ended.stderr, "nothing failed in a thread"
