"""What is planned when, and which events come of it: the real loop with a scripted runner."""

from dataclasses import replace

import msgspec
import pytest

from tests.unit.cache.fakes import FakeDisk, LoadedSource
from tests.unit.engine.driver import Engine, ends_in
from tests.unit.engine.fakes import (
    EOS,
    FakeFeatures,
    FakeMemory,
    answer_text,
    answer_tokens,
    deltas,
    prepared,
    prompt,
    seq_texts,
    submit,
    texts,
)
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import LIVE, State
from vlm_server.errors import InternalError, InvalidRequest, OutOfMemory
from vlm_server.ports import PrefillWork, Prepared, SchedulerOutput, SeqId, StepResult
from vlm_server.protocol import (
    Accepted,
    Failed,
    Finished,
    Message,
    Submit,
    Usage,
    Video,
    VideoPart,
    Working,
)

# ---- one request ---------------------------------------------------------------------


def test_a_request_gets_its_answer_and_leaves_nothing():
    engine = Engine()
    engine.add("a", text="a longer prompt", images=2)
    engine.run()
    made = prompt("a longer prompt", 2)
    assert texts(engine.events) == {"a": answer_text(made)}
    assert engine.usages == {"a": Usage(made.num_tokens, len(answer_tokens(made)))}
    reasons = [delta.finish_reason for delta in deltas(engine.events) if delta.finish_reason]
    assert reasons == ["stop"]
    assert engine.is_clean()


def counted(engine: Engine, wanted: Submit) -> Finished:
    """The end of a request of which nothing but the prompt is wanted."""
    engine.inbox.put(msgspec.structs.replace(wanted, count_only=True))
    (end,) = (event for event in engine.run() if isinstance(event, Finished))
    return end


def test_a_request_that_is_counted_only_ends_when_it_is_prepared():
    engine = Engine()
    end = counted(engine, submit("a", text="a longer prompt", images=2))
    made = prompt("a longer prompt", 2)
    token_ids = tuple(made.token_ids.tolist())
    assert (end.usage, end.token_ids) == (Usage(made.num_tokens, 0), token_ids)
    assert not engine.encoder.done
    assert not any(plan.has_runner_work for plan in engine.plans)
    assert engine.is_clean()


def test_a_prompt_beyond_the_context_can_be_counted():
    engine = Engine(context_tokens=10)
    assert counted(engine, submit("a", text="more than ten bytes")).usage == Usage(19, 0)


def test_a_request_goes_through_all_states_in_order():
    engine = Engine()
    engine.preparers.outcome = None
    engine.encoder.is_fast = False
    engine.add("a", text="a longer text", images=2)
    seen = []

    def look() -> None:
        state = engine.state_of("a")
        if state and state not in seen:
            seen.append(state)

    engine.take_in()
    look()
    engine.preparers.finish("a")
    while not engine.ended:
        engine.step()
        look()
        if engine.encoder.work:
            engine.encoder.finish()
    assert seen == [State.PREPARING, State.ENCODING, State.PREFILL, State.DECODE]


def test_pictures_are_encoded_in_order_before_the_first_chunk():
    engine = Engine(prefill_chunk_tokens=6)
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
    assert [plan.prefill for plan in engine.plans if plan.prefill] == [
        PrefillWork("a", 0, 6, False),
        PrefillWork("a", 6, 12, False),
        PrefillWork("a", 12, 13, True),
    ]


@pytest.mark.parametrize(("tokens", "chunks"), [(4, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_chunks_end_exactly_with_the_prompt(tokens: int, chunks: int):
    engine = Engine(prefill_chunk_tokens=5)
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
def test_atomic_tokens_are_one_chunk(atomic: int, chunks: list[tuple[int, int]]):
    engine = Engine()
    made = prompt(images=2)
    engine.add_prepared("a", replace(made, atomic_prefill_tokens=atomic))
    engine.run()
    assert [(start, end) for _, start, end in engine.chunks] == chunks


def test_defaults_come_from_the_checkpoint():
    engine = Engine(default_temperature=0.7, default_top_p=0.9)
    engine.add("a", temperature=None, top_p=None)
    engine.add("c", temperature=0.0, top_p=0.5)
    engine.run()
    drawn = {new.request_id: new.sampling for plan in engine.plans for new in plan.new}
    assert (drawn["a"].temperature, drawn["a"].top_p) == (0.7, 0.9)
    assert (drawn["c"].temperature, drawn["c"].top_p) == (0.0, 0.5)


# ---- several -------------------------------------------------------------------------


def test_first_come_first_served():
    engine = Engine(max_num_seqs=9)
    engine.ready(*"abcd")
    engine.run()
    assert [new.request_id for plan in engine.plans for new in plan.new] == list("abcd")


def test_sequences_decode_in_every_step_of_another_prefill():
    engine = Engine(prefill_chunk_tokens=1)
    engine.encoder.is_fast = False
    engine.add("a", max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    engine.ready("b", text="a long prompt", images=1)
    for _ in range(3):
        plan = engine.step()
        assert (plan.decode, plan.prefill) == ((SeqId("a"),), None), "decoding waits for no encode"
    engine.encoder.finish()
    plan = engine.step()
    assert plan.decode == (SeqId("a"),)
    assert plan.prefill


def test_sequences_share_one_tokens_message():
    engine = Engine()
    engine.add("a", "b", "c")
    engine.run()
    sizes = [len(event.deltas) for event in engine.events if hasattr(event, "deltas")]
    assert max(sizes) == 3


def test_no_more_sequences_than_allowed():
    engine = Engine(max_num_seqs=2, max_preparing=2)
    engine.add(*"abcdef", images=1)
    while len(engine.ended) < 6:
        engine.step()
        assert len(engine.runner.seqs) <= 2
        begun = [state for state in LIVE if state is not State.WAITING]
        assert sum(map(engine.count, begun)) <= 4
    assert engine.ended == list("abcdef")


@pytest.mark.parametrize("images", [0, 1])
def test_no_more_are_prepared_than_allowed(images: int):
    engine = Engine(max_num_seqs=9, max_preparing=2)
    engine.preparers.outcome = None
    engine.add(*"abcd", images=images)
    assert started(engine.step()) == ["a", "b"]
    assert started(engine.step()) == []
    engine.preparers.finish("b")
    assert started(engine.step()) == ["c"]


def test_a_text_passes_pictures_that_wait_for_anything():
    """For a preparer, for a place among the prepared ones, for the encoder."""
    engine = Engine(max_num_seqs=2, max_preparing=2)
    engine.encoder.is_fast = False
    engine.add(*(f"picture {number}" for number in range(9)), images=1)
    engine.step_until(lambda: engine.encoder.work is not None)
    for _ in range(3):
        engine.step()
    prepared = [State.WAITING_FOR_MEMORY, State.ENCODING, State.PREFILL]
    assert sum(map(engine.count, prepared)) == 4
    assert engine.count(State.PREPARING) == 0, "no place for more pixels"
    engine.add("text")
    engine.step_until(lambda: "text" in engine.ended)


def test_texts_and_pictures_pass_schemas_that_wait_for_anything():
    engine = Engine(max_num_seqs=2, max_preparing=2)
    engine.preparers.outcome = None
    engine.add(*(f"schema {number}" for number in range(9)), json_schema="{}")
    engine.add("both", json_schema="{}", images=1)
    engine.add("text")
    engine.add("picture", images=1)
    assert started(engine.step()) == ["schema 0", "schema 1", "both", "text", "picture"]


def test_no_more_schemas_are_compiled_than_can_wait():
    """Each keeps a process."""
    engine = Engine(max_num_seqs=2, max_preparing=2)
    engine.encoder.is_fast = False
    engine.add(*(f"{number}" for number in range(9)), json_schema="{}", images=1)
    engine.step_until(lambda: engine.encoder.work is not None)
    for _ in range(3):
        engine.step()
    begun = [state for state in LIVE if state is not State.WAITING]
    assert sum(map(engine.count, begun)) == 4


def test_a_short_prompt_goes_between_the_chunks_of_a_long_one():
    engine = Engine(prefill_chunk_tokens=2, context_tokens=1000)
    engine.ready("long", text="x" * 40)
    engine.step()
    engine.add("short", "second", text="hello")
    engine.run()
    course = [name for name, _, _ in engine.chunks]
    first = course.index("short")
    assert course[first - 1 : first + 7] == ["long", "short"] * 3 + ["long", "second"]
    assert course[-1] == "long"


def test_a_prompt_that_was_begun_keeps_its_place_in_the_batch():
    """Else it would hold its KV cache while others come and go."""
    engine = Engine(prefill_chunk_tokens=2, max_num_seqs=2, context_tokens=1000)
    engine.add("running", max_tokens=900, ignore_eos=True)
    engine.step_until(lambda: bool(engine.runner.seqs))
    engine.add("long", text="x" * 40)
    engine.step_until(lambda: "long" in engine.runner.prefills)
    engine.add("short", text="hi")
    while SeqId("long") not in engine.runner.seqs:
        engine.step()
        assert SeqId("short") not in engine.runner.seqs


def course_of(engine: Engine) -> list[tuple[str, str]]:
    """All that is done before anyone decodes, in order: ("encode" or "chunk", request)."""
    engine.run()
    course: list[tuple[str, str]] = []
    for plan in engine.plans:
        course += [("encode", work.request_id) for work in plan.encode]
        course += [("chunk", plan.prefill.request_id)] if plan.prefill else []
        course += [("encode", work.request_id) for work in plan.encode_next]
    return course


def test_a_request_with_few_pictures_goes_between_those_of_one_with_many():
    engine = Engine(prefill_chunk_tokens=64)
    usual, engine.preparers.outcome = engine.preparers.outcome, None
    engine.add("many", images=5)
    engine.add("one", "two", images=1)
    engine.step()
    for name in ("many", "one", "two"):
        engine.preparers.finish(name)
    engine.preparers.outcome = usual
    course = course_of(engine)
    assert [name for what, name in course if what == "chunk"] == ["one", "two", "many"]
    encoded = [name for what, name in course if what == "encode"]
    assert encoded == ["many", "one", "many", "many", "two", "many", "many"]


def test_of_equals_the_first_is_prefilled_before_the_next_is_encoded():
    engine = Engine(prefill_chunk_tokens=64)
    engine.ready("a", "b", "c", images=1)
    assert course_of(engine) == [(what, name) for name in "abc" for what in ("encode", "chunk")]


def test_beside_an_encode_texts_are_prefilled_and_prompts_with_pictures_wait():
    engine = Engine()
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


def test_there_is_no_work_while_all_wait_for_an_encode():
    """Else the loop would turn in circles beside the encoder."""
    engine = Engine(max_num_seqs=1, prefill_chunk_tokens=2)
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
def test_the_encoder_goes_on_while_prompts_wait_for_the_batch(waiting: str | None):
    engine = Engine(max_num_seqs=2 if waiting else 1, context_tokens=1000)
    engine.add("running", max_tokens=500, ignore_eos=True)
    engine.step_until(lambda: bool(engine.runner.seqs))
    if waiting:
        engine.add(waiting, n=2)
        engine.take_in()
    engine.add("a", "b", images=1)
    engine.step_until(lambda: len(engine.encoder.done) == 2)
    assert [work.request_id for work in engine.encoder.done] == ["a", "b"]
    assert list(engine.runner.seqs) == [SeqId("running")]


def test_pixels_are_dropped_with_their_encode_and_cache_holds_with_the_first_chunk():
    engine = Engine(prefill_chunk_tokens=2)
    engine.add("a", text="x" * 12, images=1)
    engine.step_until(lambda: engine.state_of("a") is State.ENCODING)
    assert engine.request("a")._inputs
    engine.step_until(lambda: bool(engine.runner.prefills))
    assert not engine.request("a")._inputs
    assert engine.request("a")._holds is None


def test_videos_take_one_preparer_and_leave_the_others_to_others():
    engine = Engine(max_num_seqs=9, max_preparing=3)
    engine.preparers.outcome = None
    for name in ("a", "b"):
        engine.inbox.put(video_submit(name))
    engine.add("picture", images=1)
    assert started(engine.step()) == ["a", "picture"]
    assert started(engine.step()) == []
    engine.abort("a")
    assert started(engine.step()) == []
    engine.preparers.finish("a")
    assert started(engine.step()) == ["b"]


def test_an_abort_right_after_the_hand_over_to_a_preparer_stops_it():
    """Also before its thread has begun: else a dead video is decoded, and holds up the next."""
    engine = Engine()
    engine.preparers.outcome = None
    engine.inbox.put(video_submit("a"))
    (work,) = engine.step().prepare
    engine.abort("a")
    engine.step()
    killed = []
    work.cancellation.on_cancel(lambda: killed.append("decoder"))
    assert killed == ["decoder"], "a thread that begins late is told at once"
    assert work.cancellation.is_cancelled


def test_an_aborted_preparation_keeps_its_place_until_it_is_over():
    """The thread is busy with it all the same: what is started more would queue after it."""
    engine = Engine(max_num_seqs=9, max_preparing=2)
    engine.preparers.outcome = None
    engine.add(*"abcdef")
    assert len(engine.step().prepare) == 2
    engine.abort("a")
    engine.abort("b")
    assert started(engine.step()) == []
    engine.preparers.finish("a")
    assert started(engine.step()) == ["c"]


# ---- choices -------------------------------------------------------------------------


def test_choices_share_one_prefill_and_end_each_for_itself():
    engine = Engine()
    engine.add("a", text="a longer prompt", images=2, n=3)
    engine.run()
    made = prompt("a longer prompt", 2)
    answers = {SeqId("a", i): answer_text(made, choice=i) for i in range(3)}
    assert seq_texts(engine.events) == answers
    assert len(set(answers.values())) == 3
    lengths = [len(answer_tokens(made, i)) for i in range(3)]
    assert len(set(lengths)) > 1, "they end at different steps"
    assert engine.ended == ["a"]
    assert engine.usages == {"a": Usage(made.num_tokens, sum(lengths))}
    assert sum(end - start for _, start, end in engine.chunks) == made.num_tokens
    assert engine.is_clean()


def test_each_choice_tells_its_end_with_its_last_delta():
    engine = Engine()
    engine.add("a", n=3, max_tokens=len(answer_tokens(prompt(), 1)))
    engine.run()
    for choice in range(3):
        told = [delta for delta in deltas(engine.events) if delta.choice == choice]
        *others, last = [delta.finish_reason for delta in told]
        assert set(others) <= {None}
        length, limit = (len(answer_tokens(prompt(), i)) for i in (choice, 1))
        assert last == ("stop" if length <= limit else "length")


def test_a_choice_that_ends_gives_its_place_to_the_next_request_while_its_siblings_go_on():
    engine = Engine(max_num_seqs=3)
    engine.add("a", n=3)
    engine.add("b")
    shortest, *_, longest = sorted(range(3), key=lambda i: len(answer_tokens(prompt(), i)))
    engine.step_until(lambda: SeqId("b") in engine.runner.seqs)
    assert SeqId("a", shortest) not in engine.runner.seqs
    assert SeqId("a", longest) in engine.runner.seqs
    assert engine.ended == []
    engine.run()
    assert texts(engine.events)["b"] == answer_text(prompt())


def test_a_wide_request_waits_for_room_and_nobody_passes_it():
    engine = Engine(max_num_seqs=4)
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
    assert seq_texts(engine.events)[SeqId("wide", 3)] == answer_text(prompt(), choice=3)


@pytest.mark.parametrize(("n", "is_taken"), [(3, True), (4, False), (8, False)])
def test_more_choices_than_fit_into_the_batch_are_refused(n: int, is_taken: bool):
    engine = Engine(max_num_seqs=3)
    engine.add("a", n=n)
    event = engine.take_in()[0]
    if is_taken:
        assert event == Accepted("a")
        return
    assert isinstance(event, Failed)
    assert (event.code, event.param) == ("invalid_value", "n")
    assert "3" in event.message
    assert engine.num_tracked == 0


@pytest.mark.parametrize("num_seqs", [3, 2, 1])
def test_an_abort_ends_the_choices_that_are_left(num_seqs: int):
    engine = Engine()
    engine.add("a", n=3)
    engine.step_until(lambda: 0 < len(engine.runner.seqs) <= num_seqs)
    engine.abort("a")
    (finished,) = [event for event in engine.take_in() if isinstance(event, Finished)]
    assert finished.is_aborted
    before = len(deltas(engine.events))
    engine.run()
    assert len(deltas(engine.events)) == before
    assert engine.ended == ["a"]
    assert engine.is_clean()


def test_one_choice_that_fails_ends_the_request_with_its_siblings():
    engine = Engine()
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


# ---- limits --------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [-1, 259, 2**31, 2**40])
def test_a_bias_on_no_token_fails_its_request_alone(token_id: int):
    engine = Engine(vocabulary_size=259)
    engine.add("a", logit_bias={0: 1.0, 258: -1.0})
    engine.step()
    engine.add("b", logit_bias={5: 1.0, token_id: 1.0})
    (failed,) = [event for event in engine.take_in() if isinstance(event, Failed)]
    assert (failed.code, failed.param) == ("invalid_value", "logit_bias")
    engine.run()
    assert engine.ended == ["b", "a"]
    assert engine.is_clean()


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "is_taken"),
    [(199, 1, True), (199, 2, True), (200, None, False), (200, 1, False), (150, 50, True)],
)
def test_the_prompt_must_leave_room_in_the_context(
    tokens: int, max_tokens: int | None, is_taken: bool
):
    engine = Engine(context_tokens=200)
    engine.add("a", text="x" * tokens, max_tokens=max_tokens)
    engine.step()
    events = engine.take_in()
    if is_taken:
        assert engine.state_of("a") is State.PREFILL
        return
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.code == "context_length_exceeded"
    assert str(tokens) in failed.message
    assert "200" in failed.message
    assert engine.is_clean()


@pytest.mark.parametrize("max_tokens", [None, 5, 65535])
def test_an_answer_may_fill_the_context_and_is_cut_there(max_tokens: int | None):
    engine = Engine(context_tokens=9, eos_token_ids=frozenset())
    engine.add("a", text="12345", max_tokens=max_tokens)
    engine.run()
    assert engine.usages == {"a": Usage(5, 4)}
    assert deltas(engine.events)[-1].finish_reason == "length"


def test_usage_is_reported_with_each_token_to_who_wants_it():
    engine = Engine(eos_token_ids=frozenset())
    engine.add("a", text="12345", max_tokens=2, reports_usage=True)
    engine.add("b", text="12345", max_tokens=2)
    engine.run()
    counts = [delta.usage for delta in deltas(engine.events) if delta.request_id == "a"]
    assert counts == [Usage(5, 1), Usage(5, 2)]
    assert {d.usage for d in deltas(engine.events) if d.request_id == "b"} == {None}


# ---- what the disk has -----------------------------------------------------------------


def caches_on(disk: FakeDisk) -> Caches:
    caches = Caches.of(encoder_bytes=100, prefix_bytes=1000, open_disk=lambda: disk)
    caches.begin_serving()
    return caches


def use_disk(engine: Engine) -> None:
    """Have the preparers ask the engine's caches, and so the disk."""

    def made(submit: Submit) -> Prepared:
        found = prompt(submit.messages[0].content[-1].text, len(submit.images))
        return prepared(found, engine.caches, use_disk=engine.preparers.use_disk)

    engine.preparers.outcome = made


def states_of(engine: Engine, name: str) -> list[State]:
    """The states that a request is in after each step, until nobody has anything to do."""
    seen = list[State]()
    while not engine.ended:
        engine.step()
        state = engine.state_of(name)
        if state and seen[-1:] != [state]:
            seen.append(state)
    return seen


FEATURES = {f"{number}": FakeFeatures(f"features of {number}") for number in range(2)}


def test_what_the_disk_has_is_read_after_admission_and_is_not_computed():
    source = LoadedSource(prompt("a longer", 2).key)
    disk = FakeDisk(FEATURES, source)
    engine = Engine(caches_on(disk))
    use_disk(engine)
    engine.disk_reader.is_fast = False
    engine.add("a", text="a longer prompt", images=2)
    engine.step_until(lambda: engine.state_of("a") is State.LOADING)
    assert not [call for call in disk.calls if call.startswith("load")]
    assert engine.request("a").load_bytes == len(source.prompt_key)
    engine.disk_reader.finish()
    engine.run()
    assert texts(engine.events) == {"a": answer_text(prompt("a longer prompt", 2))}
    assert engine.runner.num_cached_tokens["a"] == len(source.prompt_key)
    assert engine.encoder.done == []
    assert engine.is_clean()


def test_a_request_whose_files_are_gone_is_prepared_again_without_them():
    """It has no pixels: they seemed not to be needed."""

    class Forgetful(FakeDisk):
        def load_features(self, key: str) -> None:
            return None

    engine = Engine(caches_on(Forgetful(FEATURES)))
    use_disk(engine)
    engine.add("a", text="a longer prompt", images=2)
    assert states_of(engine, "a")[:2] == [State.PREPARING, State.LOADING]
    assert texts(engine.events) == {"a": answer_text(prompt("a longer prompt", 2))}
    assert len(engine.disk_reader.done) == 1
    assert len(engine.encoder.done) == 2
    engine.run()
    assert engine.is_clean()


def test_requests_are_read_for_one_at_a_time():
    engine = Engine(caches_on(FakeDisk(FEATURES)))
    use_disk(engine)
    engine.disk_reader.is_fast = False
    engine.add("a", "b", text="a longer prompt", images=2)
    engine.step_until(lambda: engine.count(State.LOADING) == 2)
    engine.step()
    assert engine.disk_reader.work is not None
    assert engine.disk_reader.work.request_id == "a"
    assert Working(("a",)) in engine.events, "if this kills the engine, `a` is to blame"
    engine.disk_reader.finish()
    engine.step()
    assert engine.disk_reader.work.request_id == "b"
    engine.disk_reader.is_fast = True
    engine.disk_reader.finish()
    engine.run()
    assert sorted(engine.ended) == ["a", "b"]
    assert engine.is_clean()


def test_no_more_is_read_than_memory_can_be_promised_for():
    """What does not fit beside the request is computed instead."""
    made = prompt("a longer prompt", 2)
    needed = made.num_tokens + 10 + sum(one.size_bytes for one in FEATURES.values())
    for room, num_reads in ((needed, 0), (needed + 2 * 8, 1)):
        memory = FakeMemory(active_bytes=1000, limit_bytes=1000 + room)
        engine = Engine(caches_on(FakeDisk(FEATURES)), memory=memory)
        engine.governor.reset_stats()
        use_disk(engine)
        engine.add("a", text="a longer prompt", images=2, max_tokens=10)
        engine.run()
        assert len(engine.disk_reader.done) == num_reads
        assert len(engine.encoder.done) == 2 - 2 * num_reads
        assert texts(engine.events)["a"] == answer_text(made, 10)


def test_a_reading_that_runs_out_of_memory_frees_some_and_fails_nobody():
    class Short(FakeDisk):
        def load_features(self, key: str) -> None:
            raise OutOfMemory("no memory")

    engine = Engine(caches_on(Short(FEATURES)))
    use_disk(engine)
    engine.add("a", text="a longer prompt", images=2)
    engine.run()
    assert texts(engine.events) == {"a": answer_text(prompt("a longer prompt", 2))}
    assert engine.governor.read().decisions["clear_failure"] == 1
    assert engine.is_clean()


# ---- ends ----------------------------------------------------------------------------


def bring(engine: Engine, state: State) -> None:
    """Bring request `a` there: two pictures, three chunks."""
    if state is State.WAITING:
        engine.preparers.outcome = None
        engine.add(*(f"earlier {n}" for n in range(engine.config.max_preparing)), images=1)
    if state is State.PREPARING:
        engine.preparers.outcome = None
    if state is State.WAITING_FOR_MEMORY:  # beside another, for which there is just enough
        engine.governor.reset_stats()
        engine.add("other", max_tokens=150, ignore_eos=True)
        engine.step_until(lambda: engine.count(State.DECODE) == 1)
        engine.memory.active_bytes = engine.memory.limit_bytes
    if state is State.ENCODING:
        engine.encoder.is_fast = False
    if state is State.LOADING:
        use_disk(engine)
        engine.disk_reader.is_fast = False
    engine.add("a", text="a longer text", images=2)
    engine.step_until(lambda: engine.state_of("a") is state)
    if state is State.PREFILL:
        engine.step_until(lambda: bool(engine.runner.prefills))


def let_everybody_end(engine: Engine) -> None:
    engine.memory.active_bytes = 1
    engine.encoder.is_fast = engine.disk_reader.is_fast = True
    if engine.encoder.work:
        engine.encoder.finish()
    if engine.disk_reader.work:
        engine.disk_reader.finish()
    for name in list(engine.preparers.works):
        engine.preparers.finish(name)
    engine.preparers.outcome = Engine().preparers.outcome
    engine.run()


@pytest.mark.parametrize("state", LIVE)
def test_an_abort_in_every_state_ends_it_once_and_leaves_nothing(state: State):
    engine = Engine(caches_on(FakeDisk({"0": FakeFeatures("features of 0")})))
    bring(engine, state)
    engine.abort("a")
    engine.abort("a")
    (finished,) = [event for event in engine.take_in() if isinstance(event, Finished)]
    assert finished.is_aborted
    let_everybody_end(engine)
    assert engine.ended.count("a") == 1
    assert engine.is_clean()


@pytest.mark.parametrize("state", LIVE)
def test_an_abort_in_every_state_leaves_the_others_as_they_were(state: State):
    disk = FakeDisk({"0": FakeFeatures("features of 0")})
    engine = Engine(caches_on(disk), prefill_chunk_tokens=3)
    bring(engine, state)
    engine.add("b", text="another")
    engine.abort("a")
    engine.take_in()
    let_everybody_end(engine)
    assert texts(engine.events)["b"] == answer_text(prompt("another"))
    assert engine.ended.count("b") == 1
    assert engine.is_clean()


def test_a_preparation_that_failed_ends_that_request():
    engine = Engine()
    engine.preparers.outcome = None
    engine.add("a")
    engine.step()
    engine.preparers.finish("a", InvalidRequest("no", "messages[0]"))
    assert Failed("a", "invalid_value", "no", "messages[0]") in engine.take_in()
    assert engine.is_clean()


def test_an_outcome_that_nobody_waits_for_is_released():
    caches = caches_with_a_picture()
    engine = Engine(caches)
    engine.preparers.outcome = None
    engine.add("a", images=1)
    engine.step()
    engine.abort("a")
    engine.step()
    engine.preparers.finish("a", prepared(prompt(images=1), caches))
    assert caches.features.read().pinned_bytes == 8
    engine.run()
    assert engine.ended == ["a"]
    assert engine.is_clean()


def test_one_picture_at_a_time_and_the_oldest_request_first():
    engine = Engine()
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


def test_an_older_prompt_that_becomes_ready_takes_turns_with_what_was_begun():
    engine = Engine(prefill_chunk_tokens=2)
    engine.encoder.is_fast = False
    engine.ready("a", images=1)
    engine.step()
    engine.ready("b", text="x" * 9)
    engine.step()
    engine.encoder.finish()
    engine.ready("c")
    engine.step_until(lambda: len(engine.chunks) >= 5)
    course = "".join(name for name, _, _ in engine.chunks)
    assert "abab" in course
    assert "c" not in course


def test_text_passes_a_request_whose_picture_is_being_encoded():
    engine = Engine()
    engine.encoder.is_fast = False
    engine.ready("a", images=1)
    engine.ready("b")
    engine.run()
    assert {name for name, _, _ in engine.chunks} == {"b"}


def test_a_picture_that_fails_ends_that_request_alone():
    engine = Engine()
    engine.encoder.is_fast = False
    engine.ready("a", "b", images=1)
    engine.step()
    engine.encoder.finish(InternalError("the picture failed"))
    engine.encoder.is_fast = True
    assert ends_in(engine.take_in()) == ["a"]
    engine.run()
    assert texts(engine.events) == {"b": answer_text(prompt(images=1))}
    assert engine.is_clean()


def test_chunks_shrink_to_the_time_of_a_step_while_others_wait():
    engine = Engine(prefill_chunk_tokens=64, max_step_seconds=0.1, context_tokens=1000)
    engine.runner.seconds_per_token = 0.004
    engine.add("a", text="x" * 64, max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    engine.add("b", text="x" * 64)
    engine.step_until(lambda: engine.count(State.DECODE) == 2)
    sizes = [end - start for name, start, end in engine.chunks if name == "b"]
    assert sizes == [32, 16, 16]  # 128 milliseconds are too much, and 64 are not


@pytest.mark.parametrize("images", [0, 1])
def test_a_chunk_that_fails_ends_that_request_alone(images: int):
    engine = Engine()
    engine.runner.failing_prefills.add("b")
    engine.add("a", "b", "c", images=images)
    engine.run()
    failed = [event for event in engine.events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["b"]
    assert texts(engine.events) == {name: answer_text(prompt(images=images)) for name in "ac"}
    assert engine.is_clean()


def test_a_decode_that_fails_ends_its_sequences_and_not_the_prefill_beside():
    engine = Engine(prefill_chunk_tokens=4)
    engine.add("a", "b", text="1234")
    engine.step_until(lambda: engine.count(State.DECODE) == 2)
    engine.add("c", text="1234")
    engine.runner.fails_decode = True
    engine.run()
    assert engine.ended == ["a", "b", "c"]
    assert texts(engine.events)["c"] == answer_text(prompt("1234"))
    assert engine.is_clean()


def test_a_sequence_that_fails_gets_no_token_of_the_same_step():
    engine = Engine()
    engine.ready("a")
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    result = StepResult({SeqId("a"): [EOS]}, {"a": InternalError("no")})
    plan = engine.scheduler.schedule()
    assert engine.scheduler.update(plan, result) == [Failed("a", "internal_error", "no")]


def test_tokens_of_a_request_that_is_gone_are_dropped():
    engine = Engine()
    result = StepResult({SeqId("gone"): [1]})
    assert engine.scheduler.update(SchedulerOutput(), result) == []


def test_draining_refuses_newcomers_and_finishes_the_others():
    engine = Engine()
    engine.add("a")
    engine.step()
    engine.drain()
    engine.add("b")
    (refused,) = [event for event in engine.take_in() if isinstance(event, Failed)]
    assert refused.code == "engine_unavailable"
    engine.run()
    assert texts(engine.events) == {"a": answer_text(prompt())}
    assert engine.plans[-1].is_drained
    assert engine.is_clean()


def test_a_released_sequence_is_named_once():
    engine = Engine()
    engine.add("a")
    engine.run()
    assert [plan.finished_seqs for plan in engine.plans if plan.finished_seqs] == [(SeqId("a"),)]


def test_a_request_that_the_runner_never_met_is_not_released():
    engine = Engine()
    engine.preparers.outcome = None
    engine.add("a")
    engine.step()
    engine.abort("a")
    assert not engine.step().has_runner_work


def test_a_new_scheduler_leaves_the_caches_as_they_are():
    """They may be in use: it does not own them."""
    caches = caches_with_a_picture()
    Engine(caches)
    assert caches.features.read().entries == 1


# ---- an encode beside a prompt's last chunk ------------------------------------------


def test_the_next_picture_is_encoded_beside_the_last_chunk_of_a_prompt():
    engine = Engine(prefill_chunk_tokens=4)
    engine.encoder.is_fast = False
    engine.ready("a", "b", images=1)
    engine.step()
    engine.encoder.finish()
    begun = []
    while engine.count(State.PREFILL) or not begun:
        plan = engine.step()
        assert not plan.encode, "it is the prompt's turn"
        assert plan.prefill
        begun.append((plan.prefill.is_last, [work.request_id for work in plan.encode_next]))
    assert len(begun) > 1
    assert begun == [(False, [])] * (len(begun) - 1) + [(True, ["b"])]
    assert engine.step().prefill is None, "its picture is not encoded yet"


def test_no_picture_is_encoded_beside_a_prompt_if_there_is_no_memory_for_both():
    engine = Engine(memory=FakeMemory(limit_bytes=10**6), prefill_chunk_tokens=64)
    engine.encoder.is_fast = False
    engine.ready("a", "b", images=1)
    engine.step()
    engine.encoder.finish()
    for name in ("a", "b"):
        engine.request(name).transient_bytes = 600_000
    plan = engine.step()
    assert plan.prefill
    assert plan.prefill.is_last
    assert not plan.encode_next
    plan = engine.step()
    assert [work.request_id for work in plan.encode] == ["b"]


# ---- help ----------------------------------------------------------------------------


def caches_with_a_picture() -> Caches:
    """The picture of `prompt(images=1)` is encoded."""
    caches = Caches.of(encoder_bytes=100)
    caches.store_features("0", FakeFeatures("features of 0")).release()
    return caches


def started(plan: SchedulerOutput) -> list[str]:
    return [work.submit.request_id for work in plan.prepare]


def video_submit(name: str) -> Submit:
    videos = (Video(b"", "key", "MP4", "messages[0].content[0]"),)
    shown = (Message("user", (VideoPart(0),)),)
    return msgspec.structs.replace(submit(name), messages=shown, videos=videos)
