"""Several choices of one request, which join the batch together and leave it one by one."""

from __future__ import annotations

import pytest

from tests.unit.engine.driver import SteppedEngine, ends_in
from tests.unit.engine.fakes import (
    answer_text,
    answer_texts,
    answer_tokens,
    deltas,
    prompt,
    sequence_texts,
)
from vlm_server.errors import InternalError
from vlm_server.interfaces import SeqId
from vlm_server.protocol import Accepted, Failed, Finished, Usage


def test_choices_share_one_prefill_and_end_separately():
    engine = SteppedEngine()
    engine.add("a", text="a longer prompt", images=2, n=3)
    engine.run()
    prepared_prompt = prompt("a longer prompt", 2)
    answers = {SeqId("a", i): answer_text(prepared_prompt, choice=i) for i in range(3)}
    assert sequence_texts(engine.events) == answers
    assert len(set(answers.values())) == 3
    lengths = [len(answer_tokens(prepared_prompt, i)) for i in range(3)]
    assert len(set(lengths)) > 1, "they end at different steps"
    assert engine.ended == ["a"]
    assert engine.usages == {"a": Usage(prepared_prompt.num_tokens, sum(lengths))}
    assert sum(end - start for _, start, end in engine.chunks) == prepared_prompt.num_tokens
    assert engine.is_clean()


def test_last_delta_of_choice_has_its_finish_reason():
    engine = SteppedEngine()
    engine.add("a", n=3, max_tokens=len(answer_tokens(prompt(), 1)))
    engine.run()
    for choice in range(3):
        choice_deltas = [delta for delta in deltas(engine.events) if delta.choice == choice]
        *others, last = [delta.finish_reason for delta in choice_deltas]
        assert set(others) <= {None}
        length, limit = (len(answer_tokens(prompt(), i)) for i in (choice, 1))
        assert last == ("stop" if length <= limit else "length")


def test_ended_choice_frees_its_place_while_siblings_decode():
    engine = SteppedEngine(max_num_seqs=3)
    engine.add("a", n=3)
    engine.add("b")
    shortest, *_, longest = sorted(range(3), key=lambda i: len(answer_tokens(prompt(), i)))
    engine.step_until(lambda: SeqId("b") in engine.runner.seqs)
    assert SeqId("a", shortest) not in engine.runner.seqs
    assert SeqId("a", longest) in engine.runner.seqs
    assert engine.ended == []
    engine.run()
    assert answer_texts(engine.events)["b"] == answer_text(prompt())


def test_request_of_many_choices_waits_and_is_not_overtaken():
    engine = SteppedEngine(max_num_seqs=4)
    engine.add("first", text="some text")
    engine.step_until(lambda: bool(engine.runner.seqs))
    engine.add("wide", n=4)
    engine.add("b", "c")
    while "first" not in engine.ended:
        assert [seq.request_id for seq in engine.runner.seqs] == ["first"]
        assert not engine.runner.prefills, "it would hold its cache in vain"
        engine.step()
    engine.run()
    joined = [name for name, _, _ in engine.chunks]
    assert list(dict.fromkeys(joined)) == ["first", "wide", "b", "c"]
    assert sequence_texts(engine.events)[SeqId("wide", 3)] == answer_text(prompt(), choice=3)


@pytest.mark.parametrize(("n", "is_taken"), [(3, True), (4, False), (8, False)])
def test_more_choices_than_max_num_seqs_are_refused(n: int, is_taken: bool):
    engine = SteppedEngine(max_num_seqs=3)
    engine.add("a", n=n)
    event = engine.accept()[0]
    if is_taken:
        assert event == Accepted("a")
        return
    assert isinstance(event, Failed)
    assert (event.code, event.param) == ("invalid_value", "n")
    assert "3" in event.message
    assert engine.num_tracked == 0


@pytest.mark.parametrize("num_seqs", [3, 2, 1])
def test_abort_ends_remaining_choices(num_seqs: int):
    engine = SteppedEngine()
    engine.add("a", n=3)
    engine.step_until(lambda: 0 < len(engine.runner.seqs) <= num_seqs)
    engine.abort("a")
    (finished,) = [event for event in engine.accept() if isinstance(event, Finished)]
    assert finished.is_aborted
    before = len(deltas(engine.events))
    engine.run()
    assert len(deltas(engine.events)) == before
    assert engine.ended == ["a"]
    assert engine.is_clean()


def test_failed_choice_ends_all_choices_of_its_request():
    engine = SteppedEngine()
    engine.add("a", n=2)
    engine.add("b")
    engine.step_until(lambda: len(engine.runner.seqs) == 3)
    engine.runner.failures["a"] = InternalError("NaN")
    before = len(engine.events)
    engine.step()
    events = engine.events[before:]
    assert [delta.request_id for delta in deltas(events)] == ["b"]
    assert ends_in(events) == ["a"]
    engine.run()
    assert engine.ended == ["a", "b"]
    assert engine.is_clean()
