"""Errors that come after the call that caused them, as all of Metal's do, never become tokens.

Operations of LAPACK on a CPU fail like that, too: whatever is launched next meets the error, and
nobody after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.integration.harness import EngineHarness, Load, Served, ask, cached_tokens, caches_of
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.support.whole_run import few_of
from vlm_server.engine.encoding import EncoderInTurns
from vlm_server.errors import OutOfMemory, StepTooLong
from vlm_server.protocol import Failed, Finished, Submit
from vlm_server.runner.backends.cpu import CpuBackend
from vlm_server.runner.decode import decode_batch
from vlm_server.runner.device import arrays
from vlm_server.runner.encode import encoder
from vlm_server.runner.encode.encoder import ImageEncoder, ImageEncoding
from vlm_server.runner.kv import segments
from vlm_server.runner.prefill.prefill import Prefill

pytestmark = [pytest.mark.xdist_group("late faults"), pytest.mark.last]
"""MLX 0.32.4 may hang later in a process in which operations of a CPU have failed: a task that it
counts as active can't be enqueued after an error."""

WORDS = "lu factorization failed"
"""Of LAPACK's error; each test takes it for one of Metal's."""
LOTS = 1 << 24


@pytest.fixture(params=["qwen2_5_vl", "qwen3_5"])
def served(
    request: pytest.FixtureRequest, load_tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> Served:
    """A model on a device that tells errors late, and encodes in turns."""
    loaded, preparer = load_tiny(request.param)
    monkeypatch.setattr(CpuBackend, "encodes_in_turns", True)
    monkeypatch.setattr(encoder, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(loaded.errors, "are_late", True)
    monkeypatch.setattr(arrays, "_LATE", WORDS)
    return loaded, preparer


@pytest.fixture(params=[OutOfMemory, StepTooLong])
def error_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the late error."""
    name = "_ALLOCATIONS" if request.param is OutOfMemory else "_TIME_OUTS"
    monkeypatch.setattr(arrays, name, (WORDS,))
    return request.param


def failing() -> mx.array:
    """A zero that is never computed."""
    return 0 * mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]  # type: ignore[arg-type]


def fail_next_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, spoiled: Callable[[Any], Any]
) -> list[int]:
    """Make the next call return a failing array; returns the number of such calls left."""
    real, left = getattr(owner, name), [1]

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if not left[0]:
            return result
        left[0] -= 1
        return spoiled(result)

    monkeypatch.setattr(owner, name, call)
    return left


def add(result: Any) -> Any:
    return result + failing().astype(result.dtype)


def engine_in_turns(served: Served, chunk_tokens: int = 512) -> EngineHarness:
    caches = caches_of(served, prefix_bytes=LOTS, encoder_bytes=LOTS)
    engine = EngineHarness(*served, chunk_tokens, caches=caches)
    in_parts = ImageEncoder(served[0], engine.caches.tiles)
    engine.loop.encoder = EncoderInTurns(in_parts, engine.inbox)
    return engine


def first_request(name: str = "first") -> Submit:
    return ask(name, "tell me about", random_image(1))


def second_request(name: str = "second") -> Submit:
    return ask(name, random_image(2), "and what is this?")


@pytest.fixture
def answers_alone(served: Served) -> dict[str, list[int]]:
    return {
        each.request_id: EngineHarness(*served).answer(each)
        for each in (first_request(), second_request())
    }


def check(engine: EngineHarness, answers_alone: dict[str, list[int]]) -> None:
    """Answers are right, no request is left, and the caches are intact."""
    for name, tokens in answers_alone.items():
        if name not in engine.ends:
            continue
        told = engine.tokens.get(name, [])
        assert told == tokens[: len(told)], name
        assert len(told) == len(tokens) or isinstance(engine.ends[name], Failed)
    assert engine.num_tracked == 0
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0
    assert engine.answer(first_request("again")) == answers_alone["first"], (
        "something wrong was stored"
    )
    assert engine.answer(second_request("both again")) == answers_alone["second"], (
        "something wrong was stored"
    )


def run(engine: EngineHarness) -> None:
    """The second comes while the first one's answer is written."""
    engine.add(first_request())
    engine.step_until(lambda: len(engine.tokens.get("first", ())) >= 3)
    engine.add(second_request())
    engine.run()


@pytest.mark.parametrize("at", few_of([1, 4, 7], [4]))
def test_late_decode_error_fails_only_steps_requests(
    served: Served,
    answers_alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error_kind: Any,
    at: int,
):
    engine = engine_in_turns(served)
    engine.add(first_request())
    engine.step_until(lambda: len(engine.tokens.get("first", ())) >= at)
    left = fail_next_call(
        monkeypatch, decode_batch, "sample_next", lambda made: (add(made[0]), made[1])
    )
    engine.run()
    assert left == [0]
    end = engine.ends["first"]
    assert isinstance(end, Failed)
    assert end.code == error_kind.code
    check(engine, answers_alone)


def test_late_prefill_error_repeats_prompt_and_spares_others(
    served: Served,
    answers_alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error_kind: Any,
):
    engine = engine_in_turns(served)
    engine.add(first_request())
    engine.step_until(lambda: len(engine.tokens.get("first", ())) >= 3)
    left = fail_next_call(
        monkeypatch,
        Prefill,
        "_forward_eager",
        lambda output: output._replace(logits=add(output.logits)),
    )
    engine.add(second_request())
    engine.run()
    assert left == [0]
    assert all(isinstance(engine.ends[name], Finished) for name in ("first", "second"))
    check(engine, answers_alone)


@pytest.mark.parametrize("part", [1, 2])
def test_late_encode_error_repeats_encode_and_spares_others(
    served: Served,
    answers_alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error_kind: Any,
    part: int,
):
    engine = engine_in_turns(served)
    engine.add(first_request())
    engine.step_until(lambda: len(engine.tokens.get("first", ())) >= 3)
    engine.add(second_request())
    engine.step_until(lambda: engine.loop.encoder.has_parts_left)
    for _ in range(part - 1):
        engine.step()
    left = fail_next_call(monkeypatch, ImageEncoding, "_next_part", lambda made: [*made, failing()])
    engine.run()
    assert left == [0]
    assert all(isinstance(engine.ends[name], Finished) for name in ("first", "second"))
    check(engine, answers_alone)


def test_prefix_with_late_copy_error_is_not_stored(
    served: Served,
    answers_alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error_kind: Any,
):
    engine = engine_in_turns(served)
    left = fail_next_call(monkeypatch, segments, "_copy", add)
    run(engine)
    assert left == [0]
    check(engine, answers_alone)


def test_cancelled_prefix_with_late_copy_error_is_not_stored(
    served: Served,
    answers_alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error_kind: Any,
):
    engine = engine_in_turns(served, chunk_tokens=8)
    engine.add(first_request("left"))
    engine.step_until(lambda: any(each.done >= 16 for each in engine.scheduler.stats().progress))
    left = fail_next_call(monkeypatch, segments, "quantize_in_blocks", add)
    engine.abort("left")
    engine.run()
    assert left == [0]
    check(engine, answers_alone)
    assert cached_tokens(engine, "again") == 0
