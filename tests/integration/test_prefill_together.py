"""Prompts that are prefilled in one call get the answers that each gets in its turn."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.integration.harness import EngineHarness, Load, Served, ask, caches_of
from tests.integration.schemas import SHAPE, conforming_answer, schema_sampling
from tests.integration.test_cuda_attention import as_on_cuda
from tests.support.whole_run import few_of
from vlm_server.errors import InternalError
from vlm_server.interfaces import SeqId
from vlm_server.protocol import Failed, Finished, SamplingParams, Submit
from vlm_server.runner import model_runner
from vlm_server.runner.backends.cuda import attention as cuda_attention
from vlm_server.runner.decode.decode_groups import DecodeGroups
from vlm_server.runner.kv.layers import needs_snapshots
from vlm_server.runner.prefill.batched_prefill import can_batch_prefills
from vlm_server.runner.sampling import LazyLogprobs

pytestmark = pytest.mark.families("rope", "deepstack")

__all__ = ["as_on_cuda"]

TEXTS = (
    "Hi",
    "Which colour is the shape on the left?",
    "Count to three" + ", and then to four" * 3,
    "What is on the right?",
    "Which colour is the shape on the right?",
    "Tell me.",
    "Say something nice",
    "And what is this?",
)
NOT_TAKEN = ("kimi_k25", "paddleocr_vl")
"""Families whose attention ours does not take here: mlx-vlm's computes it."""
DRAWN: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "max_tokens": 14}
KINDS = (
    SamplingParams(max_tokens=14, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=2),
    SamplingParams(n=3, seed=5, **DRAWN),
    SamplingParams(seed=1, repetition_penalty=1.3, **DRAWN),
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(n=2, seed=2, logprobs=1, **DRAWN),
    SamplingParams(seed=9, logit_bias={7: 3.0}, **DRAWN),
    SamplingParams(max_tokens=20, temperature=0.0),
)


@pytest.fixture
def eligible(served: Served) -> None:
    if not can_batch_prefills(served[0]):
        pytest.skip("not all of this family's layers only append")


def new_engine_of(served: Served, most: int = 8, **options: Any) -> EngineHarness:
    """An engine that was told that several prompts take as long as one."""
    engine = EngineHarness(*served, max_prompts_per_prefill=most, max_num_seqs=64, **options)
    engine.runner.prefill_seconds = 0.001
    # Two alone, beside nobody and beside others, of each size; then two at once, and four.
    for number, text in enumerate(("Yes", "Count to three" + ", and then to four" * 3) * 9):
        engine.add(ask(f"w{number}", f"{number} {text}", sampling=KINDS[0]))
        engine.step(number < 6)
    engine.run()
    engine.runner.prompts_at_once.clear()
    return engine


def questions() -> list[Submit]:
    return [
        ask(f"q{number}", text, sampling=sampling)
        for number, (text, sampling) in enumerate(zip(TEXTS, KINDS, strict=True))
    ]


def answers(engine: EngineHarness) -> dict[SeqId, list[int]]:
    return {seq: tokens for seq, tokens in engine.seqs.items() if seq.request_id[0] == "q"}


def scores(engine: EngineHarness) -> dict[str, list[Any]]:
    return {name: found for name, found in engine.logprobs.items() if name[0] == "q" and found}


@pytest.fixture(scope="session")
def engine_in_turn(served: Served) -> EngineHarness:
    """An engine that has answered all questions, each prefilled alone."""
    engine = EngineHarness(*served, max_num_seqs=64)
    for question in questions():
        engine.answer(question)
    return engine


@pytest.mark.usefixtures("eligible")
@pytest.mark.parametrize("num_draft_tokens", few_of([0, 7], [7]))
def test_batched_prefill_answers_equal_prefill_in_turn(
    served: Served, engine_in_turn: EngineHarness, num_draft_tokens: int
):
    engine = new_engine_of(served, num_draft_tokens=num_draft_tokens)
    for question in questions():
        engine.add(question)
    engine.run()
    assert max(engine.runner.prompts_at_once) > 1
    assert {seq: text for seq, text in engine.seq_texts.items() if seq.request_id[0] == "q"} == (
        engine_in_turn.seq_texts
    )
    assert engine.finish_reasons.items() >= engine_in_turn.finish_reasons.items()
    for name, expected in scores(engine_in_turn).items():
        found = scores(engine)[name]
        assert len(found) == len(expected)
        assert [each.token.logprob for each in found] == pytest.approx(
            [each.token.logprob for each in expected], abs=1e-4
        )


@pytest.mark.usefixtures("eligible")
def test_batched_prompts_join_running_sequences(served: Served, engine_in_turn: EngineHarness):
    engine = new_engine_of(served)
    first, *others = questions()
    engine.add(first)
    engine.step(4)
    for question in others:
        engine.add(question)
    engine.run()
    assert max(engine.runner.prompts_at_once) > 1
    assert answers(engine) == answers(engine_in_turn)


@pytest.mark.usefixtures("eligible")
def test_batched_prompts_use_and_fill_prefix_cache(served: Served, engine_in_turn: EngineHarness):
    """Also if cached lengths differ by chance; and answers continue from cached prefixes."""
    caches = caches_of(served)
    engine = new_engine_of(served, caches=caches)
    for question in questions():
        engine.add(question)
    engine.run()
    assert max(engine.runner.prompts_at_once) > 1
    assert answers(engine) == answers(engine_in_turn)
    engine.runner.prompts_at_once.clear()
    for number, question in enumerate(questions()):
        again = ask(f"again {number}", *[TEXTS[number]], sampling=question.sampling)
        tokens = engine.answer(again)
        assert tokens == engine_in_turn.tokens[f"q{number}"]
        end = engine.ends[again.request_id]
        assert isinstance(end, Finished)
        assert end.usage.cached_tokens == end.usage.prompt_tokens - 1
    assert not needs_snapshots(served[0].language_model)


@pytest.mark.usefixtures("eligible")
def test_abort_within_batch_changes_no_other_answer(served: Served, engine_in_turn: EngineHarness):
    engine = new_engine_of(served)
    for question in questions():
        engine.add(question)
    engine.step_until(lambda: max(engine.runner.prompts_at_once, default=0) > 1)
    engine.abort("q3")
    engine.abort("q7")
    engine.run()
    expected = answers(engine_in_turn)
    for seq, tokens in answers(engine).items():
        assert tokens == expected[seq][: len(tokens)]
        assert seq.request_id in ("q3", "q7") or len(tokens) == len(expected[seq])


@pytest.mark.usefixtures("eligible")
def test_cuda_attention_batched_prefill_answers_equal_prefill_in_turn(
    as_on_cuda: Served, engine_in_turn: EngineHarness, monkeypatch: pytest.MonkeyPatch
):
    rows = list[int]()
    masked = cuda_attention.masked_attention

    def watched(queries: mx.array, *args: Any) -> mx.array:
        if queries.shape[2] > 1:
            rows.append(len(queries))
        return masked(queries, *args)

    monkeypatch.setattr(cuda_attention, "masked_attention", watched)
    engine = new_engine_of(as_on_cuda, caches=caches_of(as_on_cuda))
    for question in questions():
        engine.add(question)
    engine.run()
    assert max(engine.runner.prompts_at_once) > 1
    assert max(rows, default=1) > 1 or as_on_cuda[0].family.name in NOT_TAKEN
    assert answers(engine) == answers(engine_in_turn)


def test_cuda_attention_takes_no_rows_with_too_many_scores():
    def takes(rows: int, count: int) -> bool:
        queries = mx.zeros((rows, 16, count, 64), mx.bfloat16)
        return cuda_attention.CudaAttention(256).supports(queries, queries, "causal")

    assert takes(8, 100)
    assert takes(2, 1024)
    assert not takes(8, 1000)


@pytest.fixture
def qwen(load_tiny: Load) -> Served:
    return load_tiny("qwen2_5_vl")


def test_batched_prompts_follow_their_grammars(qwen: Served):
    asks = [ask(f"q{i}", f"{i} what?", sampling=schema_sampling(SHAPE, seed=i)) for i in range(6)]
    alone = EngineHarness(*qwen)
    for each in asks:
        alone.answer(each)
    together = new_engine_of(qwen)
    for each in asks:
        together.add(each)
    together.run()
    assert max(together.runner.prompts_at_once) > 1
    for each in asks:
        conforming_answer(together, each.request_id, SHAPE)
    assert together.texts.items() >= alone.texts.items()


@pytest.mark.parametrize("fails_at_launch", [True, False])
def test_failed_batched_prefill_is_repeated_one_by_one(
    qwen: Served, monkeypatch: pytest.MonkeyPatch, fails_at_launch: bool
):
    """As if the model could not take several, and one of them not even alone."""
    engine, alone = new_engine_of(qwen), EngineHarness(*qwen, max_num_seqs=64)
    bad = ask("bad", "What is this again?", sampling=KINDS[0])

    def failing(*_: Any) -> None:
        raise RuntimeError("too many")

    join = DecodeGroups.join

    def failing_join(self: DecodeGroups, prefills: Any, logits: Any) -> Any:
        if "bad" in prefills:
            raise RuntimeError("a bad one")
        return join(self, prefills, logits)

    for question in questions():
        alone.answer(question)
    monkeypatch.setattr(DecodeGroups, "join", failing_join)
    if fails_at_launch:
        monkeypatch.setattr(model_runner, "launch_batched", failing)
    for number, question in enumerate(questions()):
        if number == 4:
            engine.add(bad)
        engine.add(question)
    engine.run()
    end = engine.ends["bad"]
    assert isinstance(end, Failed)
    assert end.code == InternalError.code
    assert max(engine.runner.prompts_at_once) > 1
    assert answers(engine) == answers(alone)


def test_unreadable_logits_leave_no_sequence_behind(qwen: Served, monkeypatch: pytest.MonkeyPatch):
    engine, alone = new_engine_of(qwen), EngineHarness(*qwen)
    asks = [ask(f"q{number}", text, sampling=KINDS[1]) for number, text in enumerate(TEXTS[3:7])]
    for each in asks:
        alone.answer(each)
    read, failures = LazyLogprobs.read, iter([True])

    def failing_once(self: LazyLogprobs) -> Any:
        if len(self.seq_ids) > 1 and next(failures, False):
            raise RuntimeError("no memory for them")
        return read(self)

    monkeypatch.setattr(LazyLogprobs, "read", failing_once)
    for each in asks:
        engine.add(each)
    most_tracked = 0
    while len(engine.ends.keys() & alone.ends.keys()) < len(asks):
        engine.step()
        most_tracked = max(most_tracked, engine.runner.num_tracked)
    assert next(failures, None) is None
    assert most_tracked == len(asks)
    assert answers(engine) == answers(alone)
    assert scores(engine).keys() == scores(alone).keys()


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_families_with_unsupported_layers_are_prefilled_in_turn(load_tiny: Load, family: str):
    assert not can_batch_prefills(load_tiny(family)[0])
