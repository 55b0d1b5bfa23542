"""Batched encodes in the real loop: which images share a call, without delaying a first token."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import (
    TOKENS_PER_IMAGE,
    FakeFeatures,
    FakeMemory,
    answer_text,
    answer_texts,
    features_of,
    prepared,
    prompt,
)
from vlm_server.cache.caches import Caches, EncodedImage
from vlm_server.cache.lru import LruCache
from vlm_server.errors import InternalError, OutOfMemory
from vlm_server.interfaces import PreparedPrompt
from vlm_server.protocol import Finished

Device = Callable[[int], float | None]
CHUNK_SECONDS, DECODE_SECONDS = 0.02, 0.001
ENCODE_SECONDS = 0.026
"""Of one image, on each of these devices."""


def gpu(count: int) -> float:
    """One image does not fill it: as measured on an H200."""
    return 0.012 + 0.014 * count


def launch_bound(count: int) -> float:
    """Images so small that what it takes to begin is all."""
    return 0.0258 + 0.0002 * count


def cpu(count: int) -> float:
    return ENCODE_SECONDS * count


def prompt_with_images(name: str, images: int) -> PreparedPrompt:
    """A prompt with images that no other request has."""
    prepared_prompt = prompt("hello", images)
    spans = tuple(replace(span, mm_hash=f"{name} {span.mm_hash}") for span in prepared_prompt.spans)
    return replace(prepared_prompt, spans=spans)


def new_engine(device: Device, most: int = 8, **options: object) -> SteppedEngine:
    """An engine that has measured its device."""
    limits = {"prefill_chunk_tokens": 100, "max_num_seqs": 8, "context_tokens": 1000} | options
    engine = SteppedEngine(max_images_per_encode=most, **limits)  # type: ignore[arg-type]
    engine.encoder.seconds = device
    for number in range(4):
        engine.add_prepared(f"earlier {number}", prompt_with_images(f"earlier {number}", 12))
    engine.run()
    engine.encoder.calls.clear()
    engine.encoder.is_fast = False
    return engine


def arrive(engine: SteppedEngine, **images: int) -> None:
    """Requests with so many images each, prepared before the next step."""
    usual, engine.preparers.outcome = engine.preparers.outcome, None
    for name, count in images.items():
        engine.add(name, images=count)
    engine.step()
    for name, count in images.items():
        engine.preparers.finish(name, prepared(prompt_with_images(name, count), engine.caches))
    engine.preparers.outcome = usual


def calls_of(engine: SteppedEngine) -> list[list[str]]:
    """The request ids of each encode call, up to the end of all requests."""
    engine.encoder.is_fast = True
    if engine.encoder.works:
        engine.encoder.finish()
    engine.run()
    assert engine.is_clean()
    return engine.encoder.calls


# ---- members of a batch ------------------------------------------------------------------


def test_images_of_request_are_encoded_in_one_batch():
    engine = new_engine(gpu)
    arrive(engine, a=6)
    assert calls_of(engine) == [["a"] * 4, ["a"] * 2]
    assert answer_texts(engine.events)["a"] == answer_text(prompt_with_images("a", 6))


def test_images_are_not_batched_on_device_without_gain():
    engine = new_engine(cpu)
    arrive(engine, a=6)
    assert calls_of(engine) == [["a"]] * 6


def test_images_are_not_batched_if_limited_to_one():
    engine = new_engine(gpu, most=1)
    arrive(engine, a=3)
    assert calls_of(engine) == [["a"]] * 3


def test_prompt_is_prefilled_before_images_of_next_request():
    """So is a short request's prompt, between the images of a long one."""
    engine = new_engine(gpu)
    arrive(engine, a=1, b=1)
    assert calls_of(engine) == [["a"], ["b"]]
    engine = new_engine(gpu)
    arrive(engine, many=6, one=1)
    assert calls_of(engine)[0] == ["many", "one"], "it would be the short one's turn anyway"


def test_two_requests_share_encode_if_it_costs_no_time():
    engine = new_engine(launch_bound)
    arrive(engine, a=1, b=1, c=1)
    assert calls_of(engine)[0] == ["a", "b"], "and no third one is begun"


def test_prompt_waiting_for_room_limits_encode_batch():
    engine = new_engine(gpu, max_num_seqs=1)
    engine.add("running", max_tokens=500, ignore_eos=True)
    engine.step_until(lambda: bool(engine.runner.seqs))
    arrive(engine, a=1, b=4)
    engine.step()
    engine.encoder.finish()
    engine.step()
    assert [work.request_id for work in engine.encoder.works] == ["b"]


def test_images_are_not_batched_while_text_waits_for_prefill():
    engine = new_engine(gpu)
    arrive(engine, text=0, a=4)
    engine.step()
    assert len(engine.encoder.works) == 1


def test_images_are_not_batched_during_last_chunk():
    engine = new_engine(gpu)
    arrive(engine, a=1, b=4)
    engine.step()
    engine.encoder.finish()
    plan = engine.step()
    assert plan.prefills
    assert [work.request_id for work in plan.encode_during_step] == ["b"]


def test_encode_batch_respects_max_step_seconds_while_decoding():
    engine = new_engine(gpu, max_step_seconds=0.06)
    engine.add("running", max_tokens=500, ignore_eos=True)
    engine.step_until(lambda: bool(engine.runner.seqs))
    arrive(engine, a=4)
    engine.step()
    assert len(engine.encoder.works) == 2
    engine = new_engine(gpu, max_step_seconds=0.06)
    arrive(engine, a=4)
    engine.step()
    assert len(engine.encoder.works) == 4


def test_duplicate_image_is_encoded_once():
    engine = new_engine(gpu, caches=Caches(encoder_bytes=10**6))
    prepared_prompt = prompt_with_images("a", 4)
    spans = [
        replace(span, mm_hash="a 0" if n == 2 else span.mm_hash)
        for n, span in enumerate(prepared_prompt.spans)
    ]
    engine.add_prepared("a", replace(prepared_prompt, spans=tuple(spans)))
    assert [len(call) for call in calls_of(engine)] == [2, 1]


def test_images_of_different_sizes_are_encoded_separately():
    engine = new_engine(gpu)
    prepared_prompt = prompt_with_images("a", 4)
    outcome = prepared(prepared_prompt, engine.caches)
    inputs = dict(outcome.inputs)
    inputs[2] = {name: array[:, :1] for name, array in inputs[2].items()}
    usual, engine.preparers.outcome = engine.preparers.outcome, None
    engine.add("a", images=4)
    engine.step()
    engine.preparers.finish("a", replace(outcome, inputs=inputs))
    engine.preparers.outcome = usual
    assert [len(call) for call in calls_of(engine)] == [2, 1, 1]


def test_encode_batch_size_respects_free_memory():
    """Beside what the request was admitted for, which is the encode of one at a time."""
    memory = FakeMemory()
    engine = new_engine(gpu, most=4, memory=memory)
    for count in (1, 2, 4):
        engine.governor.estimator.begin("encode")
        memory.peak_bytes = memory.active_bytes + (count << 20)
        engine.governor.estimator.end("encode", count * TOKENS_PER_IMAGE)
    arrive(engine, a=8)
    engine.step()
    assert len(engine.encoder.works) == 4
    of_one = engine.governor.estimator.bytes_for("encode", TOKENS_PER_IMAGE)
    reserved = engine.scheduler.reserved_bytes + engine.request("a").transient_bytes
    memory.limit_bytes = memory.active_bytes + reserved + 3 * of_one
    engine.encoder.finish()
    assert [len(call) for call in calls_of(engine)] == [4, 2, 2]


# ---- aborts and failures -----------------------------------------------------------------


def test_failed_image_fails_only_its_request():
    engine = new_engine(launch_bound)
    arrive(engine, a=1, b=1)
    engine.step()
    _, second = engine.encoder.works
    engine.encoder.finish(InternalError("a bad image"), features_of(second.span))
    calls_of(engine)
    assert engine.ended[-2:] == ["a", "b"]
    assert "a" not in answer_texts(engine.events)
    assert answer_texts(engine.events)["b"] == answer_text(prompt_with_images("b", 1))


def test_encode_batch_out_of_memory_is_retried_once():
    engine = new_engine(gpu)
    arrive(engine, a=4)
    engine.step()
    engine.encoder.finish(*(OutOfMemory("none") for _ in range(4)))
    engine.step()
    assert "a" not in engine.ended
    calls_of(engine)
    assert answer_texts(engine.events)["a"] == answer_text(prompt_with_images("a", 4))


def test_batched_encode_is_given_up_after_failures():
    engine = new_engine(lambda count: math.inf if count > 1 else ENCODE_SECONDS)
    arrive(engine, a=6)
    assert calls_of(engine) == [["a"]] * 6


class ConcurrentlyFilledCache(LruCache[EncodedImage]):
    """A cache into which another thread puts features between two lookups."""

    looked_for: str | None = None

    def __contains__(self, key: str) -> bool:
        if key == self.looked_for:
            self.put(key, FakeFeatures(f"features of {key}"), 8).release()
        self.looked_for = key
        return super().__contains__(key)


def test_features_stored_by_another_thread_are_used():
    engine = new_engine(gpu)
    engine.caches.features = ConcurrentlyFilledCache("encoder", 1 << 20)
    arrive(engine, a=3)
    calls_of(engine)
    assert answer_texts(engine.events)["a"] == answer_text(prompt_with_images("a", 3))


def test_abort_leaves_rest_of_encode_batch():
    engine = new_engine(launch_bound)
    arrive(engine, a=1, b=1)
    engine.step()
    assert len(engine.encoder.works) == 2
    engine.abort("a")
    engine.step()
    assert engine.state_of("a") is None
    assert engine.num_tracked == 2, "the encoder still has its image"
    calls_of(engine)
    assert answer_texts(engine.events)["b"] == answer_text(prompt_with_images("b", 1))
    ended = {e.request_id: e for e in engine.events if isinstance(e, Finished)}
    assert ended["a"].is_aborted


def test_abort_of_whole_encode_batch_leaves_nothing():
    engine = new_engine(launch_bound)
    arrive(engine, a=1, b=1)
    engine.step()
    engine.abort("a")
    engine.abort("b")
    engine.step()
    engine.encoder.finish()
    engine.run()
    assert engine.is_clean()


# ---- first tokens come no later ----------------------------------------------------------


def first_tokens(device: Device, most: int, images: dict[str, int]) -> dict[str, float]:
    """The end of each prompt's prefill, in seconds from their common arrival.

    A chunk takes its time, or until the end of the encode that runs beside it.
    """
    engine = new_engine(device, most)
    arrive(engine, **images)
    now = ends = 0.0
    found: dict[str, float] = {}
    while len(found) < len(images):
        was_idle = not engine.encoder.works
        plan = engine.step()
        if was_idle and engine.encoder.works:
            ends = now + device(len(engine.encoder.works))
        for chunk in plan.prefills:
            now = max(now + CHUNK_SECONDS, ends if engine.encoder.works else 0.0)
            found |= {chunk.request_id: now} if chunk.is_last else {}
        if not plan.prefills:
            now = max(now + DECODE_SECONDS, 0.0 if plan.has_runner_work else ends)
        if engine.encoder.works and now >= ends:
            engine.encoder.finish()
        assert len(engine.plans) < 3000
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("device", [gpu, launch_bound, cpu])
def test_batched_encode_delays_no_first_token(device: Device, seed: int):
    """But for the moment by which an encode ends before the decode step beside it."""
    drawn = random.Random(seed)
    names = "abcdef"[: drawn.randint(1, 6)]
    images = {name: drawn.choice([0, 1, 1, 2, 3, 5, 8]) for name in names}
    in_turn, batched = first_tokens(device, 1, images), first_tokens(device, 8, images)
    most = DECODE_SECONDS + (device(2) - device(1) if device is launch_bound else 0.0)
    assert max(batched[name] - in_turn[name] for name in names) <= most, (images, in_turn)


def test_batched_encode_speeds_up_simultaneous_agents():
    in_turn = first_tokens(launch_bound, 1, {"a": 1, "b": 1})
    batched = first_tokens(launch_bound, 8, {"a": 1, "b": 1})
    assert all(batched[name] < in_turn[name] for name in "ab")
