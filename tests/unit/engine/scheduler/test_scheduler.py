"""The states, limits and results of one request, in the real loop with a scripted runner."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import answer_text, answer_texts, answer_tokens, deltas, prompt, submit
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.config import suitable_num_seqs
from vlm_server.errors import InternalError
from vlm_server.interfaces import PrefillWork, PreparedPrompt, SeqId
from vlm_server.protocol import Failed, Finished, SamplingParams, Submit, Usage


def test_request_is_answered_and_leaves_no_state():
    engine = SteppedEngine()
    engine.add("a", text="a longer prompt", images=2)
    engine.run()
    prepared_prompt = prompt("a longer prompt", 2)
    assert answer_texts(engine.events) == {"a": answer_text(prepared_prompt)}
    assert engine.usages == {
        "a": Usage(prepared_prompt.num_tokens, len(answer_tokens(prepared_prompt)))
    }
    reasons = [delta.finish_reason for delta in deltas(engine.events) if delta.finish_reason]
    assert reasons == ["stop"]
    assert engine.is_clean()


def counted_tokens(engine: SteppedEngine, wanted: Submit) -> Finished:
    """The end of a request of which nothing but the prompt is wanted."""
    engine.inbox.put(msgspec.structs.replace(wanted, count_only=True))
    (end,) = (event for event in engine.run() if isinstance(event, Finished))
    return end


def test_token_count_request_ends_once_prepared():
    engine = SteppedEngine()
    end = counted_tokens(engine, submit("a", text="a longer prompt", images=2))
    prepared_prompt = prompt("a longer prompt", 2)
    token_ids = tuple(prepared_prompt.token_ids.tolist())
    assert (end.usage, end.token_ids) == (Usage(prepared_prompt.num_tokens, 0), token_ids)
    assert not engine.encoder.done
    assert not any(plan.has_runner_work for plan in engine.plans)
    assert engine.is_clean()


def test_prompt_beyond_context_can_be_counted():
    engine = SteppedEngine(context_tokens=10)
    assert counted_tokens(engine, submit("a", text="more than ten bytes")).usage == Usage(19, 0)


def test_request_passes_all_states_in_order():
    engine = SteppedEngine()
    engine.preparers.outcome = None
    engine.encoder.is_fast = False
    engine.add("a", text="a longer text", images=2)
    passed_states = []

    def look() -> None:
        state = engine.state_of("a")
        if state and state not in passed_states:
            passed_states.append(state)

    engine.accept()
    look()
    engine.preparers.finish("a")
    while not engine.ended:
        engine.step()
        look()
        if engine.encoder.work:
            engine.encoder.finish()
    assert passed_states == [State.PREPARING, State.ENCODING, State.PREFILL, State.DECODE]


def test_images_are_encoded_in_order_before_first_chunk():
    engine = SteppedEngine(prefill_chunk_tokens=6)
    engine.encoder.is_fast = False
    engine.ready("a", text="12345", images=2)
    for index in range(2):
        plan = engine.step()
        assert plan.encode
        assert [(work.request_id, work.span_index) for work in plan.encode] == [("a", index)]
        assert not plan.has_runner_work
        assert not engine.step().has_runner_work
        engine.encoder.finish()
    engine.run()
    assert [chunk for plan in engine.plans for chunk in plan.prefills] == [
        PrefillWork("a", 0, 6, False),
        PrefillWork("a", 6, 12, False),
        PrefillWork("a", 12, 13, True),
    ]


@pytest.mark.parametrize(("tokens", "chunks"), [(4, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_chunks_end_exactly_with_prompt(tokens: int, chunks: int):
    engine = SteppedEngine(prefill_chunk_tokens=5)
    engine.add("a", text="x" * tokens)
    engine.run()
    assert len(engine.chunks) == chunks


@pytest.mark.parametrize(
    ("atomic", "chunks"),
    [
        (0, [(0, 5), (5, 10), (10, 13)]),
        (3, [(0, 5), (5, 10), (10, 13)]),
        (8, [(0, 8), (8, 13)]),
        (13, [(0, 13)]),
    ],
)
def test_atomic_tokens_are_prefilled_in_one_chunk(atomic: int, chunks: list[tuple[int, int]]):
    engine = SteppedEngine()
    prepared_prompt = prompt(images=2)
    engine.add_prepared("a", replace(prepared_prompt, atomic_prefill_tokens=atomic))
    engine.run()
    assert [(start, end) for _, start, end in engine.chunks] == chunks


def test_sampling_defaults_come_from_checkpoint():
    own = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    asked = {"temperature": 0.0, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    engine = SteppedEngine(default_sampling=SamplingParams(**own))
    engine.add("a", temperature=None)
    engine.add("c", **asked)
    engine.run()
    drawn = {new.request_id: new.sampling for plan in engine.plans for new in plan.new}
    assert {name: getattr(drawn["a"], name) for name in own} == own
    assert {name: getattr(drawn["c"], name) for name in own} == asked


@pytest.mark.parametrize("token_id", [-1, 259, 2**31, 2**40])
def test_logit_bias_outside_vocabulary_fails_only_its_request(token_id: int):
    engine = SteppedEngine(vocabulary_size=259)
    engine.add("a", logit_bias={0: 1.0, 258: -1.0})
    engine.step()
    engine.add("b", logit_bias={5: 1.0, token_id: 1.0})
    (failed,) = [event for event in engine.accept() if isinstance(event, Failed)]
    assert (failed.code, failed.param) == ("invalid_value", "logit_bias")
    engine.run()
    assert engine.ended == ["b", "a"]
    assert engine.is_clean()


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "is_taken"),
    [(199, 1, True), (199, 2, True), (200, None, False), (200, 1, False), (150, 50, True)],
)
def test_prompt_must_leave_room_in_context(tokens: int, max_tokens: int | None, is_taken: bool):
    engine = SteppedEngine(context_tokens=200)
    engine.add("a", text="x" * tokens, max_tokens=max_tokens)
    engine.step()
    events = engine.accept()
    if is_taken:
        assert engine.state_of("a") is State.PREFILL
        return
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.code == "context_length_exceeded"
    assert str(tokens) in failed.message
    assert "200" in failed.message
    assert engine.is_clean()


@pytest.mark.parametrize("max_tokens", [None, 5, 65535])
def test_answer_is_cut_at_end_of_context(max_tokens: int | None):
    engine = SteppedEngine(context_tokens=9, eos_token_ids=frozenset())
    engine.add("a", text="12345", max_tokens=max_tokens)
    engine.run()
    assert engine.usages == {"a": Usage(5, 4)}
    assert deltas(engine.events)[-1].finish_reason == "length"


def test_usage_is_reported_with_each_token_if_requested():
    engine = SteppedEngine(eos_token_ids=frozenset())
    engine.add("a", text="12345", max_tokens=2, reports_usage=True)
    engine.add("b", text="12345", max_tokens=2)
    engine.run()
    counts = [delta.usage for delta in deltas(engine.events) if delta.request_id == "a"]
    assert counts == [Usage(5, 1), Usage(5, 2)]
    assert {d.usage for d in deltas(engine.events) if d.request_id == "b"} == {None}


# ---- settings ------------------------------------------------------------------------


MIB = 1 << 20


@pytest.mark.parametrize(
    ("free", "one", "suitable"),
    [
        (2000, 10, 100),
        (2019, 10, 100),
        (100, 10, 16),  # shorter ones may fit: admission knows
        (-100, 10, 16),
        (100_000, 10, 256),
        (2000, 0, 256),  # a state that takes nothing
    ],
)
def test_default_max_num_seqs_fills_half_of_memory(free: int, one: int, suitable: int) -> None:
    assert suitable_num_seqs(free * MIB, one * MIB) == suitable


# ---- stored prefixes -----------------------------------------------------------------


def new_engine(prefix_bytes: int = 1000) -> SteppedEngine:
    return SteppedEngine(Caches(prefix_bytes=prefix_bytes), prefill_chunk_tokens=4)


def stored_prefixes(engine: SteppedEngine) -> list[tuple[tuple[str, ...], tuple[SeqId, ...]]]:
    """Stored prompts and answers of each plan that has any."""
    both = [(plan.stored_prompts, plan.stored_answers) for plan in engine.plans]
    return [each for each in both if any(each)]


def test_prompt_is_stored_after_last_chunk_and_answer_at_end():
    engine = new_engine()
    engine.add("a", n=2)
    engine.run()
    prompt, *answers = stored_prefixes(engine)
    last_chunk = next(i for i, p in enumerate(engine.plans) if any(c.is_last for c in p.prefills))
    assert engine.plans[last_chunk + 1].stored_prompts == ("a",)
    assert prompt == (("a",), ())
    assert sorted(seq for _, seqs in answers for seq in seqs) == [SeqId("a", 0), SeqId("a", 1)]


def test_cancelled_prompt_is_stored_without_answer():
    engine = new_engine()
    engine.add("a", text="a prompt of some chunks")
    engine.step_until(lambda: len(engine.chunks) == 2)
    engine.abort("a")
    engine.run()
    assert stored_prefixes(engine) == [(("a",), ())]
    assert engine.plans[-1].is_idle


def test_failed_prompt_is_not_stored():
    engine = new_engine()
    engine.runner.chunk_errors["a"] = [InternalError("it fails")]
    engine.add("a", text="abc")
    engine.run()
    assert not stored_prefixes(engine)


def test_prompt_is_not_stored_without_cache_or_if_atomic():
    engine = new_engine(prefix_bytes=0)
    engine.add("a")
    engine.run()
    assert not stored_prefixes(engine)
    engine = new_engine()
    token_ids = np.arange(6, dtype=np.int32)
    engine.add_prepared("a", PreparedPrompt(token_ids, atomic_prefill_tokens=6))
    engine.run()
    assert not stored_prefixes(engine)
