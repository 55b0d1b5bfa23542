"""Prompts that were too much for the device are read again, in smaller chunks."""

from __future__ import annotations

import pytest

from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import answer_text, answer_texts, prompt
from vlm_server.errors import InternalError, OutOfMemory, RequestError, StepTooLong
from vlm_server.protocol import Failed, Finished

TEXT = "x" * 40


def fail(error: RequestError, times: int, **settings: int) -> SteppedEngine:
    """One request decodes; the first chunks of another fail."""
    engine = SteppedEngine(prefill_chunk_tokens=16, **settings)
    engine.add("first", text="hello", max_tokens=200)
    engine.step_until(lambda: bool(answer_texts(engine.events).get("first")))
    engine.runner.chunk_errors["a"] = [error] * times
    engine.add("a", text=TEXT)
    engine.run()
    assert answer_texts(engine.events)["first"] == answer_text(prompt("hello"))[:200]
    assert engine.num_tracked == 0
    return engine


def end_of(engine: SteppedEngine, request_id: str) -> Finished | Failed:
    (end,) = (
        each
        for each in engine.events
        if isinstance(each, Finished | Failed) and each.request_id == request_id
    )
    return end


@pytest.mark.parametrize(
    ("error", "times"),
    [(OutOfMemory("none"), 1), (StepTooLong("long"), 3)],
    ids=["out of memory", "step too long"],
)
def test_prompt_is_answered_after_retries(error: RequestError, times: int):
    engine = fail(error, times)
    assert isinstance(end_of(engine, "a"), Finished)
    assert answer_texts(engine.events)["a"] == answer_text(prompt(TEXT))
    assert engine.governor.stats().decisions[f"failure_{error.code}"] == times


@pytest.mark.parametrize(
    ("error", "times"),
    [(OutOfMemory("none"), 2), (StepTooLong("long"), 4), (InternalError("a bug"), 1)],
    ids=["out of memory", "step too long", "internal error"],
)
def test_prompt_fails_after_last_retry(error: RequestError, times: int):
    end = end_of(fail(error, times), "a")
    assert isinstance(end, Failed)
    assert end.code == error.code


def test_every_retry_halves_chunks():
    engine = fail(StepTooLong("long"), 2)
    sizes = [end - start for name, start, end in engine.chunks if name == "a"]
    assert sizes[:2] == [16, 8]
    assert max(sizes[2:]) == 4
    assert sum(sizes[2:]) == len(TEXT)


def test_larger_chunks_are_tried_again_later():
    engine = fail(StepTooLong("long"), 2)
    engine.add("long", text="y" * 100)
    engine.run()
    sizes = [end - start for name, start, end in engine.chunks if name == "long"]
    assert sizes[0] == 4
    assert max(sizes) == 8
