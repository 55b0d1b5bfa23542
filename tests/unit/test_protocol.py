"""Frames between front and engine round-trip, and malformed ones are refused."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_tests
from hypothesis import strategies as st
from msgspec.structs import replace

from vlm_server import protocol, settings
from vlm_server.protocol import (
    MESSAGE_HEADER,
    Abort,
    Accepted,
    ClearCaches,
    Command,
    Delta,
    Drain,
    EncodedSubmit,
    Event,
    Failed,
    Finished,
    Image,
    ImagePart,
    ImageUse,
    Loading,
    LogLine,
    MemoryStats,
    Message,
    ModelFacts,
    OnDevice,
    Phase,
    Ready,
    SamplingParams,
    SetMemoryLimit,
    Start,
    Stats,
    Submit,
    TextPart,
    Timeline,
    Tokens,
    Unloadable,
    Usage,
    VideoUse,
    decode_command,
    decode_event,
    encode_message,
    encode_submit,
)


def submit(data: bytes = b"\x89PNG", text: str = "What is it?") -> Submit:
    return Submit(
        request_id="r1",
        messages=(
            Message("system", (TextPart("Be brief."),)),
            Message("user", (ImagePart(0), TextPart(text))),
        ),
        images=(Image(data, "ab" * 32, "PNG", 640, 480, "messages[1].content[0]"),),
        sampling=SamplingParams(max_tokens=8, temperature=0.0, top_p=0.9, seed=7, stop=("\n", "x")),
    )


COMMANDS: list[Command] = [
    Start(
        settings.ModelSettings(),
        settings.SchedulerSettings(),
        settings.EngineSettings(),
        settings.Log(),
    ),
    submit(),
    Submit("r2", (), (), SamplingParams()),
    SetMemoryLimit(1 << 40),
    ClearCaches(),
    Submit("r3", (), (), SamplingParams(), prompt="Once", count_only=True),
    Submit("r4", (), (), SamplingParams(), prompt=(1, 2)),
    Abort("r1"),
    Drain(),
]

EVENTS: list[Event] = [
    Loading("weights", 0.5),
    Ready("qwen3_vl", "cpu", 4096),
    Ready("qwen3_vl", "cpu", 4096, ModelFacts("qwen3_vl", 1, 2, "4bit", "ab", 0.5, ("vision",), 3)),
    Unloadable("no config.json"),
    Accepted("r1"),
    OnDevice(("r1", "r2"), ("r3",), ("r4",), is_decoding=True),
    Tokens((Delta("r1", "a"), Delta("r2", "", choice=1, finish_reason="stop"))),
    Tokens(()),
    Finished("r1", Usage(10, 5, 3)),
    Finished("r1", Usage(10, 5, 3), is_aborted=True),
    Finished(
        "r1",
        Usage(10, 0, 3),
        images=(ImageUse(28, 56, 2),),
        videos=(VideoUse(4, 1.5, 8, True, 64, 32, (0.0, 0.5, 1.0, 1.5)),),
        token_ids=(5, 6),
        text="a",
    ),
    Finished("r1", Usage(10, 5), timeline=Timeline(3.5, (Phase("queue", 0.5), Phase("decode", 1)))),
    Failed("r1", "invalid_image", "can't be read", "messages[0].content[0]"),
    Failed("r1", "internal_error", "the server failed"),
    LogLine(1.5, 30, "a warning"),
    Stats({"decode": 4}, 5, {"a": 5}, MemoryStats(1, 2, 3, 4, 5, 6, 7, {"evict": 7}, 0.5), 8, 9),
]


def body_of(message: Command | EncodedSubmit | Event) -> bytearray:
    """The frame of `message` without its header, which must say the body's length."""
    frame = encode_message(message)
    (length,) = MESSAGE_HEADER.unpack(frame[: MESSAGE_HEADER.size])
    body = frame[MESSAGE_HEADER.size :]
    assert len(body) == length
    return body


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_command_round_trips_through_frame(command: Command) -> None:
    assert decode_command(body_of(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_round_trips_through_frame(event: Event) -> None:
    assert decode_event(body_of(event)) == event


def test_message_lists_cover_all_commands_and_events() -> None:
    assert {type(command) for command in COMMANDS} == set(Command.__args__)
    assert {type(event) for event in EVENTS} == set(Event.__args__)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_is_refused_as_command(event: Event) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(body_of(event))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_command_is_refused_as_event(command: Command) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_event(body_of(command))


@pytest.mark.parametrize(
    "message",
    [
        {"type": "shutdown"},
        {"type": "abort"},
        {"type": "abort", "request_id": 1},
        {"request_id": "r1"},
        {"type": "submit", "request_id": "r1", "messages": [], "images": []},
        [],
        None,
    ],
)
def test_malformed_command_is_refused(message: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("role", ["tool", "developer", ""])
def test_unknown_message_role_is_refused(role: str) -> None:
    raw = msgspec.to_builtins(submit())
    raw["messages"][0]["role"] = role
    with pytest.raises(msgspec.ValidationError):
        decode_command(msgspec.msgpack.encode(raw))


def test_truncated_message_body_is_refused() -> None:
    body = body_of(submit())
    with pytest.raises(msgspec.DecodeError):
        decode_command(body[:-1])


@given(st.binary(max_size=64))
def test_random_bytes_raise_only_decode_errors(body: bytes) -> None:
    for decode in (decode_command, decode_event):
        try:
            decode(body)
        except msgspec.DecodeError:
            continue


@given(st.text(), st.binary())
def test_submit_text_and_bytes_round_trip_unchanged(text: str, data: bytes) -> None:
    command = submit(data, text)
    assert decode_command(body_of(command)) == command


def test_encoded_submit_decodes_to_same_message() -> None:
    names = [field.name for field in msgspec.structs.fields(Submit)]
    assert sorted(names) == sorted(f.name for f in msgspec.structs.fields(EncodedSubmit))
    encoded = encode_submit(submit())
    assert decode_command(body_of(encoded)) == submit()
    changed = msgspec.structs.replace(encoded, cache_salt="another")
    assert decode_command(body_of(changed)) == replace(submit(), cache_salt="another")


@settings_of_tests(derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_messages_raise_only_decode_errors(
    damages: list[tuple[int, int]],
) -> None:
    for message in (*COMMANDS, *EVENTS):
        body = bytearray(body_of(message))
        for place, value in damages:
            body[place % len(body)] = value
        for decode in (decode_command, decode_event):
            with contextlib.suppress(msgspec.DecodeError):
                decode(bytes(body))


def test_frame_length_is_four_bytes_big_endian() -> None:
    frame = encode_message(submit(data=bytes(70_000)))
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4


def test_frame_holds_image_of_64_mib() -> None:
    command = submit(data=bytes(range(256)) * (64 * 4096))  # 64 MiB
    body = body_of(command)
    assert len(body) < protocol.MAX_MESSAGE_BYTES
    assert decode_command(body) == command
