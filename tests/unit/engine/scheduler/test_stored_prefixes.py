"""The plan says which prompts and answers the prefix cache gets, and when."""

from __future__ import annotations

import numpy as np

from tests.unit.engine.driver import SteppedEngine
from vlm_server.cache.caches import Caches
from vlm_server.errors import InternalError
from vlm_server.interfaces import PreparedPrompt, SeqId


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
