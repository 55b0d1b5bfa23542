"""With caches every family answers as without: a hit is a miss, only sooner."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.integration.harness import (
    EngineHarness,
    Part,
    Served,
    Turns,
    ask,
    cached_tokens,
    caches_of,
    conversation,
)
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.support.mechanisms import UNSTORED
from tests.support.whole_run import few_of
from tests.tiny_models import LONG_IMAGES
from vlm_server.cache.caches import Caches
from vlm_server.errors import EngineBroken
from vlm_server.protocol import SamplingParams, Submit
from vlm_server.runner.kv.layers import needs_snapshots
from vlm_server.runner.kv.segments import SequenceState

pytestmark = pytest.mark.families("caches", "deepstack", "prompts", "turns", "tiling")

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LOTS = 64 << 20
_MERGED_TOKENS = 1
"""What is before an image may be one token with the words that follow it."""
A, B = random_image(1), random_image(2)
QUESTION = "What is on the left of it, and what is below?"
PROMPTS: dict[str, tuple[Part, ...]] = {
    "text": (QUESTION,),
    "A": (A, QUESTION),
    "B": (B, QUESTION),
    "A, other question": (A, "How many are there, and which colour have they?"),
    "A and B": ("First", A, "and then", B, QUESTION),
    "B and A": ("First", B, "and then", A, QUESTION),
    "only A of both": ("First", A, "and then", QUESTION),
}


def prompt_request(name: str, request_id: str = "") -> Submit:
    return ask(request_id or name, *PROMPTS[name], sampling=GREEDY)


@pytest.fixture(scope="session")
def answer_alone(served: Served) -> Callable[[str], list[int]]:
    """The answer to a prompt without any cache."""
    return cache(lambda name: EngineHarness(*served).answer(prompt_request(name)))


class CachesOfLeftRank(Caches):
    """The caches of a rank that another one has left."""

    def store_prefix(self, *_: object) -> None:
        raise EngineBroken("a rank of the model has left")


def test_diverging_rank_breaks_engine(load_tiny: Callable[[str], Served]):
    """Other errors while storing a prompt fail no request."""
    engine = EngineHarness(*load_tiny("qwen3_vl"), caches=CachesOfLeftRank(prefix_bytes=LOTS))
    with pytest.raises(EngineBroken):
        engine.answer(prompt_request("text"))


@pytest.fixture
def engine(served: Served):
    engine = EngineHarness(*served, caches=caches_of(served))
    yield engine
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0
    assert not any(reading.pinned_bytes for reading in engine.caches.stats())


def test_repeated_requests_answer_as_without_caches(
    engine: EngineHarness, answer_alone: Callable[[str], list[int]]
):
    for name in PROMPTS:
        for time in ("first", "second"):
            assert engine.answer(prompt_request(name, f"{name}, {time}")) == answer_alone(name), (
                name,
                time,
            )
        if engine.loaded.family.name in UNSTORED:
            continue
        again, prompt = f"{name}, second", engine.prompts[f"{name}, second"]
        assert cached_tokens(engine, again) > 0, name
        assert cached_tokens(engine, again) >= max([0, *(span.end for span in prompt.spans)])
        uncached = engine.preparers.num_uncached_spans[again]
        assert not uncached, "nothing is decoded nor encoded again"


def test_concurrent_repeated_requests_answer_as_without_caches(
    engine: EngineHarness, answer_alone: Callable[[str], list[int]]
):
    names = [*PROMPTS, *PROMPTS]
    for number, name in enumerate(names):
        engine.add(prompt_request(name, f"{number}"))
        engine.step(number % 3)
    engine.run()
    assert [engine.tokens[f"{n}"] for n in range(len(names))] == [
        answer_alone(name) for name in names
    ]


@pytest.mark.families("caches", "turns")
def test_next_turn_is_prefilled_after_cached_answer(served: Served, engine: EngineHarness):
    turns: Turns = (("system", ("Answer in short words.",)),)
    plain = EngineHarness(*served)
    for number in range(4):
        turns += (("user", (f"Step {number}", random_image(10 + number), "what changed?")),)
        submit = conversation(f"turn {number}", *turns, sampling=GREEDY)
        assert engine.answer(submit) == plain.answer(submit), number
        prompt = engine.prompts[submit.request_id]
        if number:
            before = engine.prompts[f"turn {number - 1}"].key
            known = prompt.key.num_common(0, before)
            if known < prompt.atomic_prefill_tokens or served[0].family.name in UNSTORED:
                known = 0
            spans = [span for span in prompt.spans if span.end <= known]
            last = max((span.end for span in spans), default=0)
            wanted = last if needs_snapshots(served[0].language_model) else known
            assert cached_tokens(engine, submit.request_id) >= wanted
            uncached = engine.preparers.num_uncached_spans[submit.request_id]
            assert uncached == len(prompt.spans) - len(spans)
        turns += (("assistant", (engine.texts[submit.request_id],)),)


@pytest.mark.families("tiling")
def test_agent_dropping_old_screenshots_encodes_no_image_twice(
    served: Served, engine: EngineHarness
):
    """Each turn drops the oldest image, which changes the prompt after that position."""
    if engine.loaded.family.chat_template:
        pytest.skip("its template puts all pictures first")
    plain, kept = EngineHarness(*served), 2
    turns: Turns = (("system", ("Answer in short words.",)),)
    shown: list[int] = []
    for number in range(5):
        shown.append(len(turns))
        turns += (("user", (random_image(10 + number), f"Step {number}, what changed?")),)
        for place in shown[:-kept]:
            turns = (*turns[:place], ("user", turns[place][1][-1:]), *turns[place + 1 :])
        submit = conversation(f"turn {number}", *turns, sampling=GREEDY)
        assert engine.answer(submit) == plain.answer(submit), number
        assert engine.preparers.num_read[submit.request_id] == 1, "the new image alone"
        turns += (("assistant", (engine.texts[submit.request_id],)),)
        if number <= kept or served[0].family.name in UNSTORED:
            continue
        prompt, before = engine.prompts[submit.request_id], engine.prompts[f"turn {number - 1}"]
        known = prompt.key.num_common(0, before.key)
        assert known > prompt.key.num_common(0, engine.prompts["turn 0"].key)
        wanted = 0 if known < prompt.atomic_prefill_tokens else known - _MERGED_TOKENS
        assert cached_tokens(engine, submit.request_id) >= wanted


def prefilled_share(engine: EngineHarness, request_id: str) -> float:
    """Share of a prompt that is prefilled; 0 if its prefill is not in progress."""
    by_id = {each.request_id: each for each in engine.scheduler.stats().progress}
    progress = by_id.get(request_id)
    return progress.done / progress.total if progress and progress.total else 0.0


CANCELLED: dict[str, tuple[Part, ...]] = {
    "text": ("Look at the second button, and read the number. " * 12,),
    "image before": (A, "Look at the second button, and read the number. " * 12),
    "image after": ("Look at the second button, and read the number. " * 12, A, QUESTION),
}


@pytest.mark.families("caches", "prompts")
@pytest.mark.parametrize("name", few_of(CANCELLED, ["image before"]))
def test_cancelled_prefill_is_stored_for_next_request(
    served: Served, engine: EngineHarness, name: str
):
    """A client that times out after three quarters, and asks again, waits for the rest alone."""
    if served[0].family.name in UNSTORED:
        pytest.skip("its KV is not used again")
    if name == "image after" and served[0].family.name in LONG_IMAGES:
        pytest.skip("its image is most of the prompt, and stored whole or not at all")
    engine = EngineHarness(*served, chunk_tokens=16, caches=engine.caches)
    wanted = EngineHarness(*served, chunk_tokens=16).answer(ask("alone", *CANCELLED[name]))
    engine.add(ask("late", *CANCELLED[name]))
    engine.step_until(lambda: prefilled_share(engine, "late") >= 0.77)
    engine.abort("late")
    engine.run()
    assert "late" not in engine.tokens
    assert engine.answer(ask("again", *CANCELLED[name])) == wanted
    usage = engine.ends["again"].usage
    assert usage.prompt_tokens - usage.cached_tokens <= 0.3 * usage.prompt_tokens
    assert engine.answer(ask("once more", *CANCELLED[name])) == wanted


def test_failed_prefix_store_changes_no_answer(
    engine: EngineHarness, answer_alone: Callable[[str], list[int]], monkeypatch: pytest.MonkeyPatch
):
    """As when the device has no memory for the copies."""

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SequenceState, "take", fails)
    for time in ("first", "second"):
        assert engine.answer(prompt_request("A and B", time)) == answer_alone("A and B")
    assert not engine.caches.prefixes.stats().size_bytes
