"""Caches under pressure: too small, in use, aborted, failing, and with states that can't be cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import msgspec
import pytest

from tests.integration.harness import (
    DECODERS,
    GREEDY,
    EngineHarness,
    Part,
    Served,
    Turns,
    ask,
    cached_tokens,
    caches_of,
    conversation,
    encode_works,
    new_preparer,
)
from tests.integration.test_cache_twins import run_to_idle
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.errors import InvalidImage
from vlm_server.interfaces import SchedulerOutput, SeqId
from vlm_server.protocol import Failed, SamplingParams, Submit, TokenLogprob
from vlm_server.runner.distributed.messages import RankPlan, Stored, decode_message, encode
from vlm_server.runner.distributed.prefixes import FollowerPrefixes, RankZeroPrefixes, SegmentLog
from vlm_server.runner.kv.layers import needs_snapshots
from vlm_server.runner.model_runner import LaunchedStep, ModelRunner
from vlm_server.runner.prefill.prefill import Prefill

FAMILIES = ("qwen3_vl", "qwen3_5", "gemma3")
"""One that appends its KV, one with recurrent states, one with windows of 64 tokens."""
SYSTEM = "You are a helpful assistant that looks at screenshots and answers with a short text."
A, B = random_image(1), random_image(2)
SIZES: dict[str, dict[str, int]] = {
    "no token layouts": {"token_layout_bytes": 0},
    "no pixels": {"pixel_bytes": 0},
    "no features": {"encoder_bytes": 0},
    "no prefixes": {"prefix_bytes": 0},
    "one image of each": {
        "token_layout_bytes": 2000,
        "encoder_bytes": 8000,
        "prefix_bytes": 130_000,
    },
}


def sizes_of(served: Served, name: str) -> dict[str, int]:
    """`SIZES`; what an image's pixels take is each family's own."""
    if name != "one image of each":
        return SIZES[name]
    (work,) = encode_works(served[1], ask("a", A, "what?"))
    return {**SIZES[name], "pixel_bytes": 3 * sum(a.nbytes for a in work.inputs.values()) // 2}


@pytest.fixture(params=few_of(FAMILIES, ["qwen3_5", "gemma3"]), scope="module")
def served(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


def new_engine(served: Served, **sizes: int) -> EngineHarness:
    return EngineHarness(*served, chunk_tokens=48, caches=caches_of(served, **sizes))


def talk(engine: EngineHarness, name: str, num_turns: int, seed: int) -> list[list[int]]:
    """A conversation with an image in each turn; the answers' tokens."""
    turns: Turns = (("system", (SYSTEM,)),)
    answers = []
    for number in range(num_turns):
        turns += (("user", (f"Step {number}", random_image(seed + number), "what changed?")),)
        submit = conversation(f"{name} {number}", *turns, sampling=GREEDY)
        answers.append(engine.answer(submit))
        turns += (("assistant", (engine.texts[submit.request_id],)),)
    return answers


@pytest.fixture(scope="module")
def plain(served: Served) -> Callable[..., list[list[int]]]:
    """Answers of a conversation without caches."""
    return cache(lambda *arguments: talk(EngineHarness(*served), *arguments))


def test_six_turn_conversations_answer_as_without_caches(
    served: Served, plain: Callable[..., list[list[int]]]
):
    engine = new_engine(served)
    assert talk(engine, "a", 6, 10) == plain("a", 6, 10)
    assert engine.prompts["a 5"].num_tokens > 3 * 64, "the windows wrap"
    assert talk(engine, "again", 6, 10) == plain("a", 6, 10)
    run_to_idle(engine)


@pytest.mark.parametrize("size", few_of(SIZES, ["no prefixes", "one image of each"]))
def test_caches_of_any_size_change_no_answer(
    served: Served, plain: Callable[..., list[list[int]]], size: str
):
    engine = new_engine(served, **sizes_of(served, size))
    for name, seed, num_turns in (("first", 10, 6), ("other", 20, 3), ("again", 10, 6)):
        assert talk(engine, name, 3, seed) == plain("a", num_turns, seed)[:3]
    run_to_idle(engine)
    readings = engine.caches.stats()
    if size == "one image of each":
        assert all(reading.evictions for reading in readings[:3]), readings


def test_concurrent_requests_answer_as_alone_with_tiny_caches(served: Served):
    engine = new_engine(served, **sizes_of(served, "one image of each"))
    prompts: list[tuple[Part, ...]] = [(A, "what?"), (B, "what?"), (A, B, "both?"), (A, "which?")]
    for number in range(8):
        engine.add(ask(f"{number}", SYSTEM, *prompts[number % 4]))
        engine.step(number % 3)
    engine.run()
    for number, parts in enumerate(prompts):
        wanted = EngineHarness(*served).answer(ask("a", SYSTEM, *parts))
        assert engine.tokens[f"{number}"] == engine.tokens[f"{number + 4}"] == wanted
    run_to_idle(engine)


# ---- states ----------------------------------------------------------------------------


def with_system(name: str, *parts: Part, sampling: SamplingParams = GREEDY):
    return conversation(name, ("system", (SYSTEM,)), ("user", parts), sampling=sampling)


def test_cached_prefix_reaches_to_where_prompts_diverge(served: Served):
    engine = new_engine(served)
    engine.answer(with_system("first", "See", A, "what is on the left?"))
    span = engine.prompts["first"].spans[0]
    asked = {
        "other text": (("a text alone",), 40),
        "other question": (("See", A, "how many?"), span.end),
        "again": (("See", A, "what is on the left?"), span.end + 12),
    }
    for name, (parts, least) in asked.items():
        engine.answer(with_system(name, *parts))
        assert least <= cached_tokens(engine, name) < engine.prompts[name].num_tokens, name
    run_to_idle(engine)


def test_concurrent_rows_leave_their_shared_cached_prefix_unchanged(served: Served):
    """Two requests with choices extend the prefix past a window; then each repeats."""
    long = msgspec.structs.replace(GREEDY, max_tokens=70, ignore_eos=True)
    asked = {name: ("See", A, name) for name in ("what?", "which one?")}
    alone = {
        name: EngineHarness(*served).answer(with_system("a", *parts, sampling=long))
        for name, parts in asked.items()
    }
    engine = new_engine(served)
    engine.answer(with_system("before", "See", A, "how?"))
    for name, parts in asked.items():
        engine.add(with_system(name, *parts, sampling=msgspec.structs.replace(long, n=2)))
    engine.run()
    for name, parts in asked.items():
        assert cached_tokens(engine, name) >= engine.prompts[name].spans[0].end
        assert engine.seqs[SeqId(name, 0)] == engine.seqs[SeqId(name, 1)] == alone[name]
        again = with_system(f"{name} again", *parts, sampling=long)
        assert engine.answer(again) == alone[name]
    run_to_idle(engine)


def test_token_by_token_window_writes_leave_snapshots_unchanged(
    load_tiny: Callable[[str], Served],
):
    served = load_tiny("gemma3")
    first = with_system("first", "See", A, "what is on the left?")
    other = with_system("other", "See", A, "How many are there, and which colour have they?")
    engine = EngineHarness(*served, chunk_tokens=1, caches=caches_of(served))
    wanted = engine.answer(first)
    assert engine.prompts["first"].spans[0].end > 64, "the window is full"
    engine.answer(other)
    again = msgspec.structs.replace(other, request_id="again")
    assert engine.answer(again) == EngineHarness(*served).answer(other)
    last = with_system("last", "See", A, "which one?")
    assert engine.answer(last) == EngineHarness(*served).answer(last)
    assert wanted == EngineHarness(*served).answer(first)
    run_to_idle(engine)


def test_next_turn_after_aborted_answer_uses_its_prefix(served: Served):
    engine = new_engine(served)
    long = msgspec.structs.replace(GREEDY, max_tokens=40, ignore_eos=True)
    engine.add(with_system("beside", B, "what?", sampling=long))
    engine.add(with_system("aborted", A, "what?", sampling=long))
    engine.step_until(lambda: len(engine.tokens.get("aborted", [])) == 9)
    engine.abort("aborted")
    engine.run()
    told = engine.texts["aborted"]
    turns: Turns = (("system", (SYSTEM,)), ("user", (A, "what?")), ("assistant", (told,)))
    turns += (("user", ("go on",)),)
    submit = conversation("after", *turns)
    assert engine.answer(submit) == EngineHarness(*served).answer(submit)
    assert cached_tokens(engine, "after") >= engine.prompts["after"].spans[0].end
    run_to_idle(engine)


def test_aborts_at_every_step_leave_answers_unchanged(served: Served):
    engine = new_engine(served, encoder_bytes=6000)
    wanted = EngineHarness(*served).answer(ask("a", A, "and", B, "?", sampling=GREEDY))
    two = msgspec.structs.replace(GREEDY, n=2)
    for steps in range(7):
        engine.add(ask(f"{steps} gone", A, "and", B, "?", sampling=two))
        engine.step(steps)
        engine.abort(f"{steps} gone")
        run_to_idle(engine)
    assert engine.answer(ask("whole", A, "and", B, "?")) == wanted


def cancel_at(engine: EngineHarness, submit: Submit, num_tokens: int) -> list[int]:
    """Cancel a request once `num_tokens` are prefilled; returns where its chunks ended."""
    ends = [0]
    engine.add(submit)
    while ends[-1] < num_tokens:
        engine.step()
        ends += [each.done for each in engine.scheduler.stats().progress]
    engine.abort(submit.request_id)
    run_to_idle(engine)
    return ends


def test_cancelled_prefill_stores_no_partial_image(served: Served):
    """The prefix before the image stays cached, also with states that can't be cut."""
    parts = "Look at the button, and then at this:", A, "what?"
    plain = EngineHarness(*served, chunk_tokens=4)
    wanted = plain.answer(with_system("a", *parts))
    prompt = plain.prompts["a"]
    (span,) = prompt.spans
    for num_tokens in (span.start - 3, span.start + 2, span.end - 3, span.end):
        engine = EngineHarness(*served, chunk_tokens=4, caches=caches_of(served))
        ends = cancel_at(engine, with_system("late", *parts), num_tokens)
        assert engine.answer(with_system("again", *parts)) == wanted
        known = prompt.key.floor(ends[-1])
        if needs_snapshots(served[0].language_model):
            known = max(end for end in ends if end <= known)
        assert cached_tokens(engine, "again") == known
        run_to_idle(engine)


def test_follower_ranks_store_same_cancelled_prefill_as_rank_0(
    load_tiny: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
):
    """A second runner does all plans, with no more than messages."""
    served = load_tiny("qwen3_vl")
    engine, log, sent = new_engine(served), SegmentLog(), list[Stored]()
    rank_zero = RankZeroPrefixes(engine.caches, sent.append, log)
    following = FollowerPrefixes(lambda: sent.pop(0))
    follower, launch = ModelRunner(served[0], following), engine.runner.launch

    def launch_both(plan: SchedulerOutput) -> LaunchedStep:
        message = decode_message(encode(RankPlan.of(plan, log.take_dropped())))
        assert isinstance(message, RankPlan)
        step = launch(plan)
        following.drop(message.dropped)
        assert follower.launch(following.plan_of(message)).result().error is None
        assert not sent
        return step

    monkeypatch.setattr(engine.runner._prefixes, "_store", rank_zero)
    monkeypatch.setattr(engine.runner, "launch", launch_both)
    parts = A, "Look at the second button, and read the number. " * 2
    cancel_at(engine, with_system("late", *parts), 48)
    num_stored = len(following)
    assert num_stored == engine.caches.prefixes.stats().entries > 0
    assert engine.answer(with_system("again", *parts)) == EngineHarness(*served).answer(
        with_system("a", *parts)
    )
    assert cached_tokens(engine, "again") >= 48
    assert len(following) > num_stored


# ---- failures --------------------------------------------------------------------------


def test_failed_image_between_leases_releases_all_leases(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    engine = new_engine(served)
    engine.answer(ask("b", B))
    for gone in (engine.caches.prefixes, engine.caches.features, engine.caches.pixels):
        gone.clear()
    wanted = engine.answer(ask("a", A))

    def fail(image: object, budget: object) -> None:
        raise InvalidImage("it is gone", "messages[0]")

    monkeypatch.setattr(DECODERS, "image", fail)
    engine.add(ask("both", A, "and", B))
    run_to_idle(engine)
    assert isinstance(engine.ends["both"], Failed)
    assert engine.answer(ask("a again", A)) == wanted
    run_to_idle(engine)


def test_prompt_with_nan_logits_is_not_stored(load_tiny: Callable[[str], Served]):
    """No choice is stored, though the choices end one after the other."""
    served = load_tiny("qwen3_vl")
    engine = new_engine(served)
    sick = ask("sick", A, "what?", sampling=msgspec.structs.replace(GREEDY, n=3))
    embedding = served[0].language_model.model.embed_tokens
    whole = embedding.weight
    embedding.weight = whole * mx.nan
    try:
        engine.add(sick)
        engine.run()
    finally:
        embedding.weight = whole
    assert isinstance(engine.ends["sick"], Failed)
    assert not engine.caches.prefixes.stats().entries
    assert engine.answer(ask("well", A, "what?")) == EngineHarness(*served).answer(
        ask("a", A, "what?")
    )
    run_to_idle(engine)


def test_cancelled_prefill_with_nan_logits_is_not_stored(
    load_tiny: Callable[[str], Served],
):
    served = load_tiny("qwen3_5")
    engine = EngineHarness(*served, chunk_tokens=16, caches=caches_of(served))
    embedding = served[0].language_model.model.embed_tokens
    whole = embedding.weight
    embedding.weight = whole * mx.nan
    try:
        cancel_at(engine, with_system("sick", "what?"), 32)
    finally:
        embedding.weight = whole
    assert not engine.caches.prefixes.stats().entries


def test_failed_chunk_stores_no_prefix_of_its_prompt(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    engine = EngineHarness(*served, chunk_tokens=16, caches=caches_of(served))
    wait, num_waits = Prefill.wait, 0

    def fail(prefill: Prefill) -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 3:
            raise RuntimeError("the device stopped")
        wait(prefill)

    monkeypatch.setattr(Prefill, "wait", fail)
    engine.add(with_system("sick", "Look at the second button, and read the number."))
    run_to_idle(engine)
    assert isinstance(engine.ends["sick"], Failed)
    assert not engine.caches.prefixes.stats().entries


# ---- sampling ----------------------------------------------------------------------------


def test_cache_hits_change_neither_sampled_tokens_nor_logprobs(served: Served):
    """Seeds, penalties that count the prompt, several choices, and scores."""
    drawn = SamplingParams(
        max_tokens=8, temperature=1.2, seed=5, repetition_penalty=1.3, n=3, logprobs=2
    )
    plain, engine = EngineHarness(*served), new_engine(served)
    plain.answer(ask("miss", "See", A, "what?", sampling=drawn))
    engine.answer(ask("miss", "See", A, "what?", sampling=drawn))
    engine.answer(ask("hit", "See", A, "what?", sampling=drawn))
    assert cached_tokens(engine, "hit") > engine.prompts["hit"].spans[0].end - 1
    for choice in range(3):
        wanted = plain.seqs[SeqId("miss", choice)]
        assert engine.seqs[SeqId("miss", choice)] == engine.seqs[SeqId("hit", choice)] == wanted
    for name in ("miss", "hit"):
        assert scores(engine.logprobs[name]) == pytest.approx(
            scores(plain.logprobs["miss"]), abs=1e-3
        )
    run_to_idle(engine)


def scores(told: list[TokenLogprob]) -> list[float]:
    return [each.logprob for token in told for each in (token.token, *token.top)]


def test_schema_is_followed_on_cache_hit(load_tiny: Callable[[str], Served]):
    served = load_tiny("qwen3_5")
    schema = '{"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 5}'
    strict = SamplingParams(max_tokens=30, temperature=0.0, json_schema=schema)
    wanted = EngineHarness(*served).answer(ask("a", A, "how many?", sampling=strict))
    engine = new_engine(served)
    engine.preparers.preparer = new_preparer(served[0], caches=engine.caches)
    engine.answer(ask("free", A, "how many?"))
    assert engine.answer(ask("strict", A, "how many?", sampling=strict)) == wanted
    assert cached_tokens(engine, "strict") > engine.prompts["strict"].spans[0].end
    assert needs_snapshots(served[0].language_model)
    run_to_idle(engine)
