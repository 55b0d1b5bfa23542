"""An answer's text, times and counts are read from timed pieces of a stream."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cli.scripted_server import event
from vlm_server.cli.client.answer import TimedAnswer, failed_answer, read_answer

DONE = b"data: [DONE]\n\n"


def delta(**fields: Any) -> bytes:
    return event(id="x", object="chat.completion.chunk", choices=[{"index": 0, "delta": fields}])


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def test_answer_times_come_from_deltas_with_text():
    pieces = [
        (0.1, delta(role="assistant", content="")),
        (0.2, delta(content="a")),
        (0.5, delta(content="b") + delta(content="")),
        (0.6, delta(content="c") + delta(content="d")),
        (0.7, event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])),
        (0.8, event(choices=[], usage=USAGE) + DONE),
    ]
    answer = read_answer(pieces, 0.9)
    assert answer.text == "abcd"
    assert answer.ttft == 0.2
    assert answer.gaps == pytest.approx([0.3, 0.1, 0.0])
    assert answer.total_seconds == 0.9
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (5, 4, 3)
    assert answer.error is None


def test_delta_time_is_arrival_of_last_byte():
    whole = delta(content="a")
    answer = read_answer([(0.1, whole[:-1]), (0.3, whole[-1:] + DONE)], 0.3)
    assert answer.ttft == 0.3


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_deltas_count_as_text(field: str):
    answer = read_answer([(0.1, delta(**{field: "hm"}) + DONE)], 0.1)
    assert (answer.text, answer.ttft) == ("hm", 0.1)


def test_null_usage_gives_unknown_token_counts():
    answer = read_answer([(0.1, event(choices=[], usage=None, error=None) + DONE)], 0.1)
    assert answer == TimedAnswer(total_seconds=0.1)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (b"", "ended before"),
        (event(error={"message": "out of luck"}) + DONE, "out of luck"),
        (b"data: {nonsense\n\n" + DONE, "not a chat completion chunk"),
        (b"data: \xff\n\n" + DONE, "not a chat completion chunk"),
        (event(choices=[{"delta": {"content": 7}}]) + DONE, "not a chat completion chunk"),
    ],
)
def test_broken_stream_gives_error_without_ttft(last: bytes, message: str):
    answer = read_answer([(0.1, delta(content="a")), (0.2, last)], 0.2)
    assert answer.error is not None
    assert message in answer.error
    assert answer.ttft is None


def test_answer_error_is_cut_to_300_characters():
    error = failed_answer("x" * 10_000, 0.0).error
    assert error is not None
    assert len(error) == 300
