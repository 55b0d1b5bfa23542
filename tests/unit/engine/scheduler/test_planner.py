"""Plans for several requests at once, by the real loop with a scripted runner."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import FakeFeatures, FakeMemory, submit
from vlm_server.engine.request.states import LIVE, State
from vlm_server.interfaces import SchedulerOutput, SeqId
from vlm_server.protocol import Message, Submit, Video, VideoPart


def started(plan: SchedulerOutput) -> list[str]:
    return [work.submit.request_id for work in plan.prepare]


def video_submit(name: str) -> Submit:
    videos = (Video(b"", "key", "MP4", "messages[0].content[0]"),)
    shown = (Message("user", (VideoPart(0),)),)
    return msgspec.structs.replace(submit(name), messages=shown, videos=videos)


def test_equal_prompts_are_prefilled_in_order_of_arrival():
    engine = SteppedEngine(max_num_seqs=9)
    engine.ready(*"abcd")
    engine.run()
    assert [new.request_id for plan in engine.plans for new in plan.new] == list("abcd")


def test_sequences_decode_in_every_step_during_prefill():
    engine = SteppedEngine(prefill_chunk_tokens=1)
    engine.encoder.is_fast = False
    engine.add("a", max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    engine.ready("b", text="a long prompt", images=1)
    for _ in range(3):
        plan = engine.step()
        assert (plan.decode, plan.prefills) == ((SeqId("a"),), ()), "decoding waits for no encode"
    engine.encoder.finish()
    plan = engine.step()
    assert plan.decode == (SeqId("a"),)
    assert plan.prefills


def test_tokens_of_step_share_one_message():
    engine = SteppedEngine()
    engine.add("a", "b", "c")
    engine.run()
    sizes = [len(event.deltas) for event in engine.events if hasattr(event, "deltas")]
    assert max(sizes) == 3


def test_running_sequences_never_exceed_max_num_seqs():
    engine = SteppedEngine(max_num_seqs=2, max_preparing=2)
    engine.add(*"abcdef", images=1)
    while len(engine.ended) < 6:
        engine.step()
        assert len(engine.runner.seqs) <= 2
        begun = [state for state in LIVE if state is not State.WAITING]
        assert sum(map(engine.count, begun)) <= 4
    assert engine.ended == list("abcdef")


@pytest.mark.parametrize("images", [0, 1])
def test_preparations_never_exceed_max_preparing(images: int):
    engine = SteppedEngine(max_num_seqs=9, max_preparing=2)
    engine.preparers.outcome = None
    engine.add(*"abcd", images=images)
    assert started(engine.step()) == ["a", "b"]
    assert started(engine.step()) == []
    engine.preparers.finish("b")
    assert started(engine.step()) == ["c"]


def test_text_overtakes_waiting_images():
    """The images wait for a preparer, for a place among prepared requests, and for the encoder."""
    engine = SteppedEngine(max_num_seqs=2, max_preparing=2)
    engine.encoder.is_fast = False
    engine.add(*(f"image {number}" for number in range(9)), images=1)
    engine.step_until(lambda: engine.encoder.work is not None)
    for _ in range(3):
        engine.step()
    prepared = [State.WAITING_FOR_MEMORY, State.ENCODING, State.PREFILL]
    assert sum(map(engine.count, prepared)) == 4
    assert engine.count(State.PREPARING) == 0, "no place for more pixels"
    engine.add("text")
    engine.step_until(lambda: "text" in engine.ended)


def test_texts_and_images_overtake_waiting_schemas():
    engine = SteppedEngine(max_num_seqs=2, max_preparing=2)
    engine.preparers.outcome = None
    engine.add(*(f"schema {number}" for number in range(9)), json_schema="{}")
    engine.add("both", json_schema="{}", images=1)
    engine.add("text")
    engine.add("image", images=1)
    assert started(engine.step()) == ["schema 0", "schema 1", "both", "text", "image"]


def test_compiled_schemas_never_exceed_waiting_places():
    """Each keeps a process."""
    engine = SteppedEngine(max_num_seqs=2, max_preparing=2)
    engine.encoder.is_fast = False
    engine.add(*(f"{number}" for number in range(9)), json_schema="{}", images=1)
    engine.step_until(lambda: engine.encoder.work is not None)
    for _ in range(3):
        engine.step()
    begun = [state for state in LIVE if state is not State.WAITING]
    assert sum(map(engine.count, begun)) == 4


def test_short_prompt_is_prefilled_between_chunks_of_long_one():
    engine = SteppedEngine(prefill_chunk_tokens=2, context_tokens=1000)
    engine.ready("long", text="x" * 40)
    engine.step()
    engine.add("short", "second", text="hello")
    engine.run()
    order = [name for name, _, _ in engine.chunks]
    first = order.index("short")
    assert order[first - 1 : first + 7] == ["long", "short"] * 3 + ["long", "second"]
    assert order[-1] == "long"


def test_begun_prompt_keeps_its_place_in_batch():
    """Otherwise it would hold its KV while later requests overtake it."""
    engine = SteppedEngine(prefill_chunk_tokens=2, max_num_seqs=2, context_tokens=1000)
    engine.add("running", max_tokens=900, ignore_eos=True)
    engine.step_until(lambda: bool(engine.runner.seqs))
    engine.add("long", text="x" * 40)
    engine.step_until(lambda: "long" in engine.runner.prefills)
    engine.add("short", text="hi")
    while SeqId("long") not in engine.runner.seqs:
        engine.step()
        assert SeqId("short") not in engine.runner.seqs


def device_work_order(engine: SteppedEngine) -> list[tuple[str, str]]:
    """The work before the first decode step, in order: ("encode" or "chunk", request)."""
    engine.run()
    order: list[tuple[str, str]] = []
    for plan in engine.plans:
        order += [("encode", work.request_id) for work in plan.encode]
        order += [("chunk", chunk.request_id) for chunk in plan.prefills]
        order += [("encode", work.request_id) for work in plan.encode_during_step]
    return order


def test_few_images_are_encoded_between_those_of_another_request():
    engine = SteppedEngine(prefill_chunk_tokens=64)
    usual, engine.preparers.outcome = engine.preparers.outcome, None
    engine.add("many", images=5)
    engine.add("one", "two", images=1)
    engine.step()
    for name in ("many", "one", "two"):
        engine.preparers.finish(name)
    engine.preparers.outcome = usual
    order = device_work_order(engine)
    assert [name for what, name in order if what == "chunk"] == ["one", "two", "many"]
    encoded = [name for what, name in order if what == "encode"]
    assert encoded == ["many", "one", "many", "many", "two", "many", "many"]


def test_first_equal_request_is_prefilled_before_next_encode():
    engine = SteppedEngine(prefill_chunk_tokens=64)
    engine.ready("a", "b", "c", images=1)
    assert device_work_order(engine) == [
        (what, name) for name in "abc" for what in ("encode", "chunk")
    ]


def test_prompts_without_images_are_prefilled_during_encode():
    engine = SteppedEngine()
    engine.encoder.is_fast = False
    engine.add("many", images=3)
    engine.step_until(lambda: engine.encoder.work is not None)
    engine.ready("b")
    engine.ready("other", images=1)
    engine.run()
    assert {name for name, _, _ in engine.chunks} == {"b"}
    assert engine.ended == ["b"]
    engine.encoder.is_fast = True
    engine.encoder.finish()
    engine.run()
    assert sorted(engine.ended) == ["b", "many", "other"]


def test_plan_is_empty_while_all_requests_wait_for_encode():
    """Otherwise the loop would spin while the encoder works."""
    engine = SteppedEngine(max_num_seqs=1, prefill_chunk_tokens=2)
    engine.add("a", text="x" * 12, images=1)
    engine.step_until(lambda: "a" in engine.runner.prefills)
    engine.encoder.is_fast = False
    engine.ready("b", images=1)
    engine.ready("text")
    engine.step_until(lambda: engine.encoder.work is not None)
    engine.run()
    assert not engine.step().has_runner_work
    engine.encoder.is_fast = True
    engine.encoder.finish()
    engine.run()
    assert sorted(engine.ended) == ["a", "b", "text"]


@pytest.mark.parametrize("waiting", ["wide", None])
def test_encoding_continues_while_prompts_wait_for_batch(waiting: str | None):
    engine = SteppedEngine(max_num_seqs=2 if waiting else 1, context_tokens=1000)
    engine.add("running", max_tokens=500, ignore_eos=True)
    engine.step_until(lambda: bool(engine.runner.seqs))
    if waiting:
        engine.add(waiting, n=2)
        engine.accept()
    engine.add("a", "b", images=1)
    engine.step_until(lambda: len(engine.encoder.done) == 2)
    assert [work.request_id for work in engine.encoder.done] == ["a", "b"]
    assert list(engine.runner.seqs) == [SeqId("running")]


def test_pixels_and_cache_references_are_dropped_by_first_chunk():
    engine = SteppedEngine(prefill_chunk_tokens=2)
    engine.add("a", text="x" * 12, images=1)
    engine.step_until(lambda: engine.state_of("a") is State.ENCODING)
    assert engine.request("a")._inputs
    engine.step_until(lambda: bool(engine.runner.prefills))
    assert not engine.request("a")._inputs
    assert engine.request("a")._references is None


def test_videos_take_only_one_preparer():
    engine = SteppedEngine(max_num_seqs=9, max_preparing=3)
    engine.preparers.outcome = None
    for name in ("a", "b"):
        engine.inbox.put(video_submit(name))
    engine.add("image", images=1)
    assert started(engine.step()) == ["a", "image"]
    assert started(engine.step()) == []
    engine.abort("a")
    assert started(engine.step()) == []
    engine.preparers.finish("a")
    assert started(engine.step()) == ["b"]


def test_abort_cancels_preparation_that_has_not_begun():
    """Also before its thread has begun: else a dead video is decoded, and holds up the next."""
    engine = SteppedEngine()
    engine.preparers.outcome = None
    engine.inbox.put(video_submit("a"))
    (work,) = engine.step().prepare
    engine.abort("a")
    engine.step()
    killed = []
    work.cancellation.on_cancel(lambda: killed.append("decoder"))
    assert killed == ["decoder"], "a thread that begins late is told at once"
    assert work.cancellation.is_cancelled


def test_aborted_preparation_keeps_its_place_until_it_ends():
    """The thread is busy with it all the same: what is started more would queue after it."""
    engine = SteppedEngine(max_num_seqs=9, max_preparing=2)
    engine.preparers.outcome = None
    engine.add(*"abcdef")
    assert len(engine.step().prepare) == 2
    engine.abort("a")
    engine.abort("b")
    assert started(engine.step()) == []
    engine.preparers.finish("a")
    assert started(engine.step()) == ["c"]


def test_images_are_encoded_singly_oldest_request_first():
    engine = SteppedEngine()
    engine.encoder.is_fast = False
    engine.ready("a", "b", images=2)
    plan = engine.step()
    assert plan.encode
    assert [(work.request_id, work.span_index) for work in plan.encode] == [("a", 0)]
    assert not engine.step().encode
    engine.abort("a")
    assert not engine.step().encode, "the encoder is still at it"
    engine.encoder.finish(FakeFeatures("late"))
    plan = engine.step()
    assert [work.request_id for work in plan.encode] == ["b"]


def test_older_prompt_alternates_with_begun_one():
    engine = SteppedEngine(prefill_chunk_tokens=2)
    engine.encoder.is_fast = False
    engine.ready("a", images=1)
    engine.step()
    engine.ready("b", text="x" * 9)
    engine.step()
    engine.encoder.finish()
    engine.ready("c")
    engine.step_until(lambda: len(engine.chunks) >= 5)
    order = "".join(name for name, _, _ in engine.chunks)
    assert "abab" in order
    assert "c" not in order


def test_text_is_prefilled_during_encode_of_older_request():
    engine = SteppedEngine()
    engine.encoder.is_fast = False
    engine.ready("a", images=1)
    engine.ready("b")
    engine.run()
    assert {name for name, _, _ in engine.chunks} == {"b"}


def test_chunks_shrink_to_max_step_seconds_while_others_decode():
    engine = SteppedEngine(prefill_chunk_tokens=64, max_step_seconds=0.1, context_tokens=1000)
    engine.runner.prefill_seconds = lambda plan: 0.004 * plan.num_prefill_tokens
    engine.add("a", text="x" * 64, max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    engine.add("b", text="x" * 64)
    engine.step_until(lambda: engine.count(State.DECODE) == 2)
    sizes = [end - start for name, start, end in engine.chunks if name == "b"]
    assert sizes == [32, 16, 16]  # 128 milliseconds are too much, and 64 are not


def test_piggybacked_chunks_fill_mixed_step():
    engine = SteppedEngine(prefill_chunk_tokens=64, context_tokens=1000, max_num_seqs=9)
    engine.runner.mixed_step_tokens = 24
    engine.add("a", text="x" * 64, max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    engine.add("b", text="x" * 62, n=2, max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 2)
    engine.add("c", text="x" * 62)
    engine.step_until(lambda: engine.count(State.DECODE) == 3)
    sizes = {
        name: [end - start for one, start, end in engine.chunks if one == name] for name in "abc"
    }
    assert sizes == {"a": [64], "b": [23, 23, 16], "c": [21, 21, 20]}


@pytest.mark.parametrize("in_turns", [False, True])
def test_next_image_is_encoded_during_prompts_last_chunks(in_turns: bool):
    """In turns, an encode takes two steps, of which the prompt has the same two."""
    engine = SteppedEngine(prefill_chunk_tokens=4, encodes_in_turns=in_turns)
    engine.encoder.is_fast = False
    engine.ready("a", "b", images=1)
    engine.step()
    engine.encoder.finish()
    begun = []
    while engine.count(State.PREFILL) or not begun:
        plan = engine.step()
        assert not plan.encode, "it is the prompt's turn"
        (chunk,) = plan.prefills
        begun.append((chunk.is_last, [work.request_id for work in plan.encode_during_step]))
    assert len(begun) > 2
    assert [is_last for is_last, _ in begun] == [False] * (len(begun) - 1) + [True]
    at = len(begun) - (2 if in_turns else 1)
    assert [names for _, names in begun] == [["b"] if n == at else [] for n in range(len(begun))]
    assert not engine.step().prefills, "its image is not encoded yet"


def test_encode_waits_for_prefill_without_memory_for_both():
    engine = SteppedEngine(memory=FakeMemory(limit_bytes=10**6), prefill_chunk_tokens=64)
    engine.encoder.is_fast = False
    engine.ready("a", "b", images=1)
    engine.step()
    engine.encoder.finish()
    for name in ("a", "b"):
        engine.request(name).transient_bytes = 600_000
    plan = engine.step()
    (chunk,) = plan.prefills
    assert chunk.is_last
    assert not plan.encode_during_step
    plan = engine.step()
    assert [work.request_id for work in plan.encode] == ["b"]
