"""The recorder's figures of one answer, by a fake clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from vlm_server.api.http.model_metrics import Histogram, ModelMetrics
from vlm_server.api.http.recorder import AnswerRecorder
from vlm_server.protocol import Delta, Finished, ImageUse, Phase, Timeline, ToolCallDelta, Usage

PHASES = (
    Phase("queue", 1.0),
    Phase("prepare", 2.0),
    Phase("queue", 4.0),
    Phase("encode", 8.0),
    Phase("prefill", 16.0),
    Phase("decode", 32.0),
)


NO_TIME = Timeline()


@dataclass
class Answer:
    """An answer received at 100 and handed to the engine at 103."""

    is_stream: bool = True
    now: float = 103.0
    figures: ModelMetrics = field(default_factory=ModelMetrics)

    def __post_init__(self) -> None:
        self.recorder = AnswerRecorder(
            self.figures,
            "demo",
            "chatcmpl-1",
            100.0,
            is_stream=self.is_stream,
            clock=lambda: self.now,
        )

    def give(self, at: float, *choices: int, text: str = "a") -> None:
        self.now = at
        self.recorder.record_deltas([Delta("r", text, choice=choice) for choice in choices])

    def finish(self, at: float, timeline: Timeline = NO_TIME, *images: ImageUse) -> None:
        self.now = at
        self.recorder.finish(Finished("r", Usage(70, 30, 20), images=images, timeline=timeline))


def read(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, pytest.approx(histogram.sum)


def test_answer_is_recorded_once_with_all_its_times() -> None:
    answer = Answer()
    figures = answer.figures
    with answer.recorder as recorder:
        assert (figures.num_waiting, figures.num_running) == (1, 0)
        recorder.begin()
        recorder.begin()
        assert (figures.num_waiting, figures.num_running) == (0, 1)
        answer.give(110, 0)
        answer.give(112, 0)
        answer.give(117, 0)
        recorder.finish_reasons[0] = "stop"
        answer.finish(118, Timeline(103.5, PHASES), ImageUse(1, 1, 40), ImageUse(1, 1, 24))
        answer.now = 120
    assert (figures.num_waiting, figures.num_running) == (0, 0)
    assert read(figures.time_to_first_token) == (1, 10)
    assert read(figures.inter_token_latency) == (2, 7)
    assert read(figures.longest_silence) == (1, 5)
    assert read(figures.latency) == (1, 20)
    assert read(figures.prompt_tokens) == (1, 70)
    assert read(figures.generation_tokens) == (1, 30)
    assert read(figures.image_tokens) == (1, 64)
    assert read(figures.inference) == (1, 56)
    found = {name: read(histogram) for name, histogram in figures.phases.items()}
    assert found == {
        "queue": (1, 5.5),  # with the way to the engine
        "prepare": (1, 2),
        "encode": (1, 8),
        "prefill": (1, 16),
        "decode": (1, 32),
    }
    assert figures.ended == {"stop": 1, "length": 0, "tool_calls": 0, "abort": 0, "error": 0}


def test_recorded_phases_have_no_gaps() -> None:
    answer = Answer()
    answer.finish(170, Timeline(103.5, PHASES))
    spans = answer.recorder.spans
    assert spans[0] == ("receive", 100, 103)
    assert spans[1] == ("queue", 103, 104.5)
    assert all(before[2] == after[1] for before, after in pairwise(spans))
    assert spans[-1] == ("decode", 134.5, 166.5)
    assert answer.recorder.server_timing(170.0) == (
        "receive;dur=3000.0, queue;dur=5500.0, prepare;dur=2000.0, encode;dur=8000.0, "
        "prefill;dur=16000.0, decode;dur=32000.0, total;dur=70000.0"
    )


def test_foreign_engine_clock_gives_no_negative_phase() -> None:
    answer = Answer()
    answer.finish(170, Timeline(0.0, PHASES))
    assert min(answer.recorder.phase_seconds().values()) >= 0


def test_choices_have_own_latencies_and_share_longest_silence() -> None:
    answer = Answer()
    with answer.recorder:
        answer.give(110, 0)
        answer.give(113, 1)
        answer.give(114, 0, 1)
        answer.give(119, 0, text="")
        answer.finish(120)
    assert read(answer.figures.inter_token_latency) == (2, 5)
    assert read(answer.figures.longest_silence) == (1, 3)


def test_tool_call_delta_counts_as_first_token() -> None:
    answer = Answer()
    with answer.recorder as recorder:
        answer.now = 104
        recorder.record_deltas([Delta("r", "", tool_call=ToolCallDelta(0, "id", "f"))])
        recorder.finish_reasons[0] = "tool_calls"
        answer.finish(120)
    assert read(answer.figures.time_to_first_token) == (1, 4)
    assert answer.figures.ended["tool_calls"] == 1


def test_truncated_choice_counts_answer_as_length() -> None:
    answer = Answer()
    with answer.recorder as recorder:
        for choice, reason in enumerate(("stop", "length", "tool_calls")):
            recorder.finish_reasons[choice] = reason  # type: ignore[arg-type]
        answer.finish(120)
    assert answer.figures.ended["length"] == 1


def test_whole_answer_records_no_silence() -> None:
    answer = Answer(is_stream=False)
    with answer.recorder:
        answer.give(110, 0)
        answer.give(119, 0)
        answer.finish(120)
    assert read(answer.figures.longest_silence) == (0, 0)
    assert read(answer.figures.inter_token_latency) == (1, 9)
    assert read(answer.figures.image_tokens) == (0, 0)
    assert read(answer.figures.phases["encode"]) == (0, 0)


def lose(answer: Answer, error: type[BaseException], *given_at: float) -> None:
    """End the answer with `error` at 150."""
    with pytest.raises(error), answer.recorder:
        _raise(answer, error, *given_at)


def _raise(answer: Answer, error: type[BaseException], *given_at: float) -> None:
    for at in given_at:
        answer.recorder.begin()
        answer.give(at, 0)
    answer.now = 150
    raise error


def test_aborted_waiting_request_records_its_queue_time() -> None:
    answer = Answer()
    lose(answer, asyncio.CancelledError)
    assert read(answer.figures.phases["queue"]) == (1, 47)
    assert read(answer.figures.latency) == (0, 0)
    assert answer.figures.ended["abort"] == 1
    assert (answer.figures.num_waiting, answer.figures.num_running) == (0, 0)


@pytest.mark.parametrize(
    ("error", "reason"), [(asyncio.CancelledError, "abort"), (ValueError, "error")]
)
def test_silence_before_lost_answer_is_recorded(error: type[BaseException], reason: str) -> None:
    answer = Answer()
    lose(answer, error, 110, 111)
    assert read(answer.figures.longest_silence) == (1, 39)
    assert read(answer.figures.phases["queue"]) == (0, 0)
    assert answer.figures.ended[reason] == 1
    assert (answer.figures.num_waiting, answer.figures.num_running) == (0, 0)
