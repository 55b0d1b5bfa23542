"""What is planned when, and which events come of it."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from tests.unit.engine.fakes import (
    EOS,
    FakeEncoder,
    FakeFeatures,
    FakeRunner,
    answer_text,
    answer_tokens,
    deltas,
    features_of,
    prompt,
    scheduler,
    seq_texts,
    submit,
    texts,
)
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduling.scheduler import Scheduler
from vlm_server.errors import InternalError, InvalidRequest
from vlm_server.ports import EncodeWork, PrefillWork, SchedulerOutput, SeqId, StepResult
from vlm_server.protocol import Accepted, Event, Failed, Finished, Message, Usage, Video, VideoPart


def runner_for(planner: Scheduler) -> FakeRunner:
    limits = planner._config
    return FakeRunner(limits.max_num_seqs, limits.prefill_chunk_tokens)


def add(planner: Scheduler, *names: str, text: str = "hello", **kwargs: object) -> None:
    """Requests that are prepared at once."""
    images = int(kwargs.pop("images", 0))  # type: ignore[call-overload]
    for name in names:
        assert planner.add(submit(name, text, images, **kwargs)) == [Accepted(name)]
    for _ in names:
        for started in planner.start_preparing():
            planner.prepared(started.request_id, prompt(text, images))


def encode_all(planner: Scheduler) -> list[EncodeWork]:
    """Encode whatever waits for it; the work done, in order."""
    done: list[EncodeWork] = []
    while work := planner.start_encoding():
        done.append(work)
        planner.encoded(work.request_id, FakeEncoder().encode(work.prompt, work.image_index))
    return done


def beat(planner: Scheduler, runner: FakeRunner) -> list[Event]:
    encode_all(planner)
    plan = planner.schedule()
    return planner.update(plan, StepResult() if plan.is_empty else runner.execute(plan))


def run(planner: Scheduler, runner: FakeRunner, steps: int = 1000) -> list[Event]:
    events: list[Event] = []
    while encode_all(planner) or planner.has_runner_work:
        events += beat(planner, runner)
        steps -= 1
        assert steps, "no end"
    return events


def terminals(events: list[Event]) -> list[str]:
    return [event.request_id for event in events if isinstance(event, Finished | Failed)]


# ---- one request ---------------------------------------------------------------------


def test_a_request_gets_its_answer_and_leaves_nothing():
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a", text="a longer prompt", images=2)
    events = run(planner, runner)
    made = prompt("a longer prompt", 2)
    assert texts(events) == {"a": answer_text(made)}
    assert events[-1] == Finished("a", Usage(made.num_tokens, len(answer_tokens(made))))
    assert [delta.finish_reason for delta in deltas(events) if delta.finish_reason] == ["stop"]
    assert planner.num_tracked == 0
    assert runner.num_tracked == 0


def test_pictures_are_encoded_in_order_before_the_first_chunk():
    planner = scheduler(prefill_chunk_tokens=6)
    runner = runner_for(planner)
    add(planner, "a", text="12345", images=2)
    assert not planner.has_runner_work
    assert planner.schedule().is_empty
    encoded = encode_all(planner)
    assert [(work.request_id, work.image_index) for work in encoded] == [("a", 0), ("a", 1)]
    run(planner, runner)
    assert [plan.prefill for plan in runner.plans if plan.prefill] == [
        PrefillWork("a", 0, 6, False),
        PrefillWork("a", 6, 12, False),
        PrefillWork("a", 12, 13, True),
    ]


@pytest.mark.parametrize(("tokens", "chunks"), [(4, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_chunks_end_exactly_with_the_prompt(tokens: int, chunks: int):
    planner = scheduler(prefill_chunk_tokens=5)
    runner = runner_for(planner)
    add(planner, "a", text="x" * tokens)
    run(planner, runner)
    assert sum(plan.prefill is not None for plan in runner.plans) == chunks


@pytest.mark.parametrize(
    ("uncut", "chunks"),
    [
        (0, [(0, 5), (5, 10), (10, 13)]),
        (3, [(0, 5), (5, 10), (10, 13)]),
        (8, [(0, 8), (8, 13)]),
        (13, [(0, 13)]),
    ],
)
def test_what_must_not_be_cut_is_one_chunk(uncut: int, chunks: list[tuple[int, int]]):
    planner = scheduler()
    runner = runner_for(planner)
    planner.add(submit("a", images=2))
    planner.start_preparing()
    planner.prepared("a", replace(prompt(images=2), atomic_prefill_tokens=uncut))
    run(planner, runner)
    done = [plan.prefill for plan in runner.plans if plan.prefill]
    assert [(work.start, work.end) for work in done] == chunks


def test_defaults_come_from_the_checkpoint():
    planner = scheduler(default_temperature=0.7, default_top_p=0.9)
    add(planner, "a", "b", temperature=None, top_p=None)
    add(planner, "c", temperature=0.0, top_p=0.5)
    runner = runner_for(planner)
    run(planner, runner)
    drawn = {new.request_id: new.sampling for plan in runner.plans for new in plan.new}
    assert (drawn["a"].temperature, drawn["a"].top_p) == (0.7, 0.9)
    assert (drawn["c"].temperature, drawn["c"].top_p) == (0.0, 0.5)


# ---- several -------------------------------------------------------------------------


def test_first_come_first_served():
    planner = scheduler(max_num_seqs=9, max_preparing=9)
    runner = runner_for(planner)
    for name in "abcd":
        planner.add(submit(name))
    started = [s.request_id for s in planner.start_preparing()]
    assert started == list("abcd")
    for name in reversed(started):
        planner.prepared(name, prompt())
    run(planner, runner)
    assert [new.request_id for plan in runner.plans for new in plan.new] == list("abcd")


def test_running_rows_decode_in_every_step_of_another_prefill():
    planner = scheduler(prefill_chunk_tokens=1)
    runner = runner_for(planner)
    add(planner, "a")
    while not planner.count(State.DECODE):
        beat(planner, runner)
    add(planner, "b", text="a long prompt", images=1)
    work = planner.start_encoding()
    assert work
    for _ in range(3):
        plan = planner.schedule()
        assert (plan.decode, plan.prefill) == ((SeqId("a"),), None), "decoding waits for no encode"
        planner.update(plan, runner.execute(plan))
    planner.encoded("b", features_of(work.prompt.images[0]))
    plan = planner.schedule()
    assert plan.decode == (SeqId("a"),)
    assert plan.prefill


def test_rows_share_one_tokens_message():
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a", "b", "c")
    events = [e for e in run(planner, runner) if not isinstance(e, Finished)]
    assert max(len(event.deltas) for event in events) == 3  # type: ignore[union-attr]


def test_no_more_rows_than_allowed():
    planner = scheduler(max_num_seqs=2, max_preparing=2)
    runner = runner_for(planner)
    for name in "abcdef":
        planner.add(submit(name, images=1))
    events: list[Event] = []
    while planner.has_requests:
        for started in planner.start_preparing():
            planner.prepared(started.request_id, prompt(images=1))
        events += beat(planner, runner)
        assert len(runner.rows) <= 2
        states = [planner.count(s) for s in (State.PREPARING, State.PREFILL, State.DECODE)]
        assert sum(states) <= 4
    assert terminals(events) == list("abcdef")


@pytest.mark.parametrize("images", [0, 1])
def test_no_more_are_prepared_than_allowed(images: int):
    planner = scheduler(max_num_seqs=9, max_preparing=2)
    for name in "abcd":
        planner.add(submit(name, images=images))
    assert [s.request_id for s in planner.start_preparing()] == ["a", "b"]
    assert planner.start_preparing() == []
    planner.prepared("b", prompt())
    assert [s.request_id for s in planner.start_preparing()] == ["c"]


def test_a_text_goes_past_pictures_that_wait_for_anything():
    """For a preparer, for a place among the prepared ones, for the encoder."""
    planner = scheduler(max_num_seqs=2, max_preparing=2)
    runner = runner_for(planner)
    for number in range(9):
        planner.add(submit(f"picture {number}", images=1))
    for _ in range(2):
        for started in planner.start_preparing():
            planner.prepared(started.request_id, prompt(images=1))
    assert planner.count(State.PREFILL) == 4
    assert [s.request_id for s in planner.start_preparing()] == [], "no place for more pixels"
    assert planner.start_encoding()
    planner.add(submit("text"))
    (started,) = planner.start_preparing()
    planner.prepared(started.request_id, prompt())
    events: list[Event] = []
    while "text" not in terminals(events):
        plan = planner.schedule()
        assert not plan.is_empty
        events += planner.update(plan, runner.execute(plan))


def test_a_short_prompt_goes_between_the_chunks_of_a_long_one():
    planner = scheduler(prefill_chunk_tokens=2, context_tokens=1000)
    runner = runner_for(planner)
    add(planner, "long", text="x" * 40)
    beat(planner, runner)
    add(planner, "short", "second", text="hello")
    run(planner, runner)
    course = [plan.prefill.request_id for plan in runner.plans if plan.prefill]
    assert course[:8] == ["long", "short"] * 3 + ["long", "second"]
    assert course[-1] == "long"


def test_a_prompt_that_was_begun_keeps_its_row():
    """Else it would hold its KV cache while others come and go."""
    planner = scheduler(prefill_chunk_tokens=2, max_num_seqs=2, context_tokens=1000)
    runner = runner_for(planner)
    add(planner, "row", max_tokens=900, ignore_eos=True)
    while not runner.rows:
        beat(planner, runner)
    add(planner, "long", text="x" * 40)
    beat(planner, runner)
    add(planner, "short", text="hi")
    while SeqId("long") not in runner.rows:
        beat(planner, runner)
        assert SeqId("short") not in runner.rows


def encodes_and_chunks(planner: Scheduler, runner: FakeRunner) -> list[tuple[str, str]]:
    """All that is done before anyone decodes, in order: ("encode" or "chunk", request)."""
    course: list[tuple[str, str]] = []
    while (encoded := encode_all(planner)) or planner.has_runner_work:
        course += [("encode", work.request_id) for work in encoded]
        plan = planner.schedule()
        if plan.prefill:
            course.append(("chunk", plan.prefill.request_id))
        planner.update(plan, runner.execute(plan))
    return course


def test_a_request_with_few_pictures_goes_between_those_of_one_with_many():
    planner = scheduler(max_preparing=3, prefill_chunk_tokens=64)
    add(planner, "many", images=5)
    add(planner, "one", "two", images=1)
    course = encodes_and_chunks(planner, runner_for(planner))
    done = [name for what, name in course if what == "chunk"]
    assert done == ["one", "two", "many"]
    encoded = [name for what, name in course if what == "encode"]
    assert encoded == ["many", "one", "many", "many", "two", "many", "many"]


def test_of_equals_the_first_is_prefilled_before_the_next_is_encoded():
    planner = scheduler(max_preparing=3, prefill_chunk_tokens=64)
    add(planner, "a", "b", "c", images=1)
    course = encodes_and_chunks(planner, runner_for(planner))
    assert course == [(what, name) for name in "abc" for what in ("encode", "chunk")]


def test_beside_an_encode_texts_are_prefilled_and_prompts_with_pictures_wait():
    planner = scheduler(max_preparing=3)
    runner = runner_for(planner)
    add(planner, "a", images=1)
    encode_all(planner)
    add(planner, "many", images=3)
    beat(planner, runner)
    while (work := planner.start_encoding()) is None:
        planner.update(plan := planner.schedule(), runner.execute(plan))
    assert work.request_id == "many"
    add(planner, "b", images=0)
    prefilled = set()
    while planner.has_runner_work:
        plan = planner.schedule()
        assert not plan.is_empty
        prefilled |= {plan.prefill.request_id} if plan.prefill else set()
        planner.update(plan, runner.execute(plan))
    assert prefilled <= {"a", "b"}
    assert "b" in prefilled
    planner.encoded(work.request_id, FakeEncoder().encode(work.prompt, work.image_index))
    assert terminals(run(planner, runner)) == ["many"]


def test_there_is_no_work_while_all_wait_for_an_encode():
    """Else the loop would turn in circles beside the encoder."""
    planner = scheduler(max_num_seqs=1, max_preparing=3, prefill_chunk_tokens=2)
    runner = runner_for(planner)
    add(planner, "a", text="x" * 12, images=1)
    while not (plan := planner.schedule()).prefill:
        encode_all(planner)
    planner.update(plan, runner.execute(plan))
    add(planner, "b", images=1)
    add(planner, "text")
    while (work := planner.start_encoding()) is None:
        planner.update(plan := planner.schedule(), runner.execute(plan))
    assert not planner.has_runner_work
    assert planner.schedule().is_empty
    planner.encoded(work.request_id, FakeEncoder().encode(work.prompt, work.image_index))
    assert sorted(terminals(run(planner, runner))) == ["a", "b", "text"]


def test_the_encoder_goes_on_behind_a_text_that_waits_for_rows():
    planner = scheduler(max_num_seqs=2, max_preparing=3, context_tokens=1000)
    runner = runner_for(planner)
    add(planner, "row", max_tokens=500, ignore_eos=True)
    while not runner.rows:
        beat(planner, runner)
    add(planner, "wide", n=2)
    add(planner, "a", "b", images=1)
    assert [work.request_id for work in encode_all(planner)] == ["a", "b"]


def test_pixels_are_let_go_of_with_the_first_chunk():
    planner = scheduler(max_preparing=3, prefill_chunk_tokens=2)
    add(planner, "a", text="x" * 12, images=1)
    encode_all(planner)
    plan = planner.schedule()
    assert plan.new[0].prompt.images
    planner.update(plan, StepResult())
    (request,) = planner._requests.values()
    assert request.prompt is not None
    assert not request.prompt.images


def test_the_encoder_goes_on_while_a_prompt_waits_for_a_row():
    planner = scheduler(max_num_seqs=1, max_preparing=3, context_tokens=1000)
    runner = runner_for(planner)
    add(planner, "row", max_tokens=500, ignore_eos=True)
    while not runner.rows:
        beat(planner, runner)
    add(planner, "a", "b", images=1)
    assert [work.request_id for work in encode_all(planner)] == ["a", "b"]


def test_videos_take_one_preparer_and_leave_the_others_to_others():
    planner = scheduler(max_num_seqs=9, max_preparing=3)
    videos = (Video(b"", "key", "MP4", "messages[0].content[0]"),)
    shown = (Message("user", (VideoPart(0),)),)
    for name in ("a", "b"):
        planner.add(msgspec.structs.replace(submit(name), messages=shown, videos=videos))
    planner.add(submit("picture", images=1))
    assert [s.request_id for s in planner.start_preparing()] == ["a", "picture"]
    assert planner.start_preparing() == []
    planner.abort("a")
    assert planner.start_preparing() == []
    planner.prepared("a", prompt())
    assert [s.request_id for s in planner.start_preparing()] == ["b"]


def test_an_aborted_preparation_keeps_its_place_until_it_is_over():
    """The thread is busy with it all the same: what is started more would queue behind it."""
    planner = scheduler(max_num_seqs=9, max_preparing=2)
    for name in "abcdef":
        planner.add(submit(name))
    assert len(planner.start_preparing()) == 2
    planner.abort("a")
    planner.abort("b")
    assert planner.start_preparing() == []
    assert planner.prepared("a", prompt()) == []
    assert [s.request_id for s in planner.start_preparing()] == ["c"]


# ---- choices -------------------------------------------------------------------------


def test_choices_share_one_prefill_and_end_each_for_itself():
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a", text="a longer prompt", images=2, n=3)
    events = run(planner, runner)
    made = prompt("a longer prompt", 2)
    assert seq_texts(events) == {SeqId("a", i): answer_text(made, choice=i) for i in range(3)}
    assert len(set(seq_texts(events).values())) == 3
    lengths = [len(answer_tokens(made, i)) for i in range(3)]
    assert len(set(lengths)) > 1, "they end at different steps"
    assert terminals(events) == ["a"]
    assert events[-1] == Finished("a", Usage(made.num_tokens, sum(lengths)))
    chunks = [plan.prefill for plan in runner.plans if plan.prefill]
    assert sum(chunk.end - chunk.start for chunk in chunks) == made.num_tokens
    assert planner.num_tracked == runner.num_tracked == 0


def test_each_choice_tells_its_end_with_its_last_delta():
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a", n=3, max_tokens=len(answer_tokens(prompt(), 1)))
    told = deltas(run(planner, runner))
    for choice in range(3):
        *others, last = [delta.finish_reason for delta in told if delta.choice == choice]
        assert set(others) <= {None}
        length, limit = (len(answer_tokens(prompt(), i)) for i in (choice, 1))
        assert last == ("stop" if length <= limit else "length")


def test_a_choice_that_ends_gives_its_row_to_the_next_request_while_its_siblings_go_on():
    planner = scheduler(max_num_seqs=3)
    runner = runner_for(planner)
    add(planner, "a", n=3)
    add(planner, "b")
    shortest, *_, longest = sorted(range(3), key=lambda i: len(answer_tokens(prompt(), i)))
    events: list[Event] = []
    while SeqId("b") not in runner.rows:
        events += beat(planner, runner)
    assert SeqId("a", shortest) not in runner.rows
    assert SeqId("a", longest) in runner.rows
    assert terminals(events) == []
    assert texts(events + run(planner, runner))["b"] == answer_text(prompt())


def test_a_wide_request_waits_for_room_and_nobody_passes_it():
    planner = scheduler(max_num_seqs=4, max_preparing=9)
    runner = runner_for(planner)
    add(planner, "first", text="some text")
    while not runner.rows:
        beat(planner, runner)
    add(planner, "wide", n=4)
    add(planner, "b", "c")
    events: list[Event] = []
    while "first" not in terminals(events):
        assert [row.request_id for row in runner.rows] == ["first"]
        assert not runner.prefills, "it would hold its cache in vain"
        events += beat(planner, runner)
    events += run(planner, runner)
    joined = [plan.prefill.request_id for plan in runner.plans if plan.prefill]
    assert list(dict.fromkeys(joined)) == ["first", "wide", "b", "c"]
    assert seq_texts(events)[SeqId("wide", 3)] == answer_text(prompt(), choice=3)


@pytest.mark.parametrize(("n", "is_taken"), [(3, True), (4, False), (8, False)])
def test_more_choices_than_rows_are_refused(n: int, is_taken: bool):
    planner = scheduler(max_num_seqs=3)
    (event,) = planner.add(submit("a", n=n))
    if is_taken:
        assert event == Accepted("a")
        return
    assert isinstance(event, Failed)
    assert (event.code, event.param) == ("invalid_value", "n")
    assert "3" in event.message
    assert planner.num_tracked == 0


@pytest.mark.parametrize("num_rows", [3, 2, 1])
def test_an_abort_ends_the_choices_that_are_left(num_rows: int):
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a", n=3)
    while not runner.rows or len(runner.rows) > num_rows:
        beat(planner, runner)
    assert len(runner.rows) == num_rows
    (finished,) = planner.abort("a")
    assert isinstance(finished, Finished)
    assert finished.is_aborted
    assert run(planner, runner) == []
    assert planner.num_tracked == runner.num_tracked == 0


def test_one_choice_that_fails_ends_the_request_with_its_siblings():
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a", n=2)
    add(planner, "b")
    while len(runner.rows) < 3:
        beat(planner, runner)
    plan = planner.schedule()
    result = runner.execute(plan)
    failing = StepResult(result.tokens, {"a": InternalError("NaN")})
    events = planner.update(plan, failing)
    assert [delta.request_id for delta in deltas(events)] == ["b"]
    assert terminals(events) == ["a"]
    assert terminals(run(planner, runner)) == ["b"]
    assert planner.num_tracked == runner.num_tracked == 0


# ---- limits --------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [-1, 259, 2**31, 2**40])
def test_a_bias_on_no_token_fails_its_request_alone(token_id: int):
    planner = scheduler(vocabulary_size=259)
    runner = runner_for(planner)
    add(planner, "a", logit_bias={0: 1.0, 258: -1.0})
    beat(planner, runner)
    (failed,) = planner.add(submit("b", logit_bias={5: 1.0, token_id: 1.0}))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == ("invalid_value", "logit_bias")
    assert terminals(run(planner, runner)) == ["a"]
    assert planner.num_tracked == 0


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "is_taken"),
    [(199, 1, True), (199, 2, False), (200, None, False), (199, None, True), (150, 50, True)],
)
def test_prompt_and_answer_must_fit_the_context(
    tokens: int, max_tokens: int | None, is_taken: bool
):
    planner = scheduler(context_tokens=200)
    planner.add(submit("a", max_tokens=max_tokens))
    planner.start_preparing()
    events = planner.prepared("a", prompt("x" * tokens))
    if is_taken:
        assert events == []
        assert planner.count(State.PREFILL) == 1
        return
    (failed,) = events
    assert isinstance(failed, Failed)
    assert failed.code == "context_length_exceeded"
    assert str(tokens) in failed.message
    assert "200" in failed.message
    assert planner.num_tracked == 0


def test_without_max_tokens_the_answer_may_fill_the_context():
    planner = scheduler(context_tokens=9, eos_token_ids=frozenset())
    runner = runner_for(planner)
    add(planner, "a", text="12345")
    events = run(planner, runner)
    assert events[-1] == Finished("a", Usage(5, 4))
    assert deltas(events)[-1].finish_reason == "length"


# ---- ends ----------------------------------------------------------------------------


def in_state(planner: Scheduler, runner: FakeRunner, state: State) -> None:
    """Bring request `a` there, from wherever it is: two pictures, three chunks."""
    if state is State.WAITING:
        return
    planner.start_preparing()
    if state is State.PREPARING:
        return
    planner.prepared("a", prompt("a longer text", 2))
    if state is State.PREFILL:
        for _ in range(3):
            beat(planner, runner)
        assert runner.prefills
    while state is State.DECODE and not planner.count(State.DECODE):
        beat(planner, runner)


LIVE = (State.WAITING, State.PREPARING, State.PREFILL, State.DECODE)


@pytest.mark.parametrize("state", LIVE)
def test_an_abort_in_every_state_ends_it_once_and_leaves_nothing(state: State):
    planner = scheduler()
    runner = runner_for(planner)
    planner.add(submit("a", "a longer text", 2))
    in_state(planner, runner, state)
    assert planner.count(state) == 1
    (finished,) = planner.abort("a")
    assert isinstance(finished, Finished)
    assert finished.is_aborted
    assert planner.abort("a") == []
    assert planner.prepared("a", prompt()) == []
    assert terminals(run(planner, runner)) == []
    assert planner.num_tracked == 0
    assert runner.num_tracked == 0


@pytest.mark.parametrize("state", LIVE)
def test_an_abort_in_every_state_leaves_the_others_as_they_were(state: State):
    planner = scheduler(prefill_chunk_tokens=3)
    runner = runner_for(planner)
    planner.add(submit("a", "a longer text", 2))
    in_state(planner, runner, state)
    add(planner, "b", text="another")
    planner.abort("a")
    events = run(planner, runner)
    assert texts(events)["b"] == answer_text(prompt("another"))
    assert terminals(events) == ["b"]


def test_a_preparation_that_failed_ends_that_request():
    planner = scheduler()
    planner.add(submit("a"))
    planner.start_preparing()
    assert planner.prepared("a", InvalidRequest("no", "messages[0]")) == [
        Failed("a", "invalid_value", "no", "messages[0]")
    ]
    assert planner.num_tracked == 0


def test_an_outcome_that_nobody_waits_for_is_no_error():
    planner = scheduler()
    assert planner.prepared("nobody", prompt()) == []
    assert planner.abort("nobody") == []


def test_one_picture_at_a_time_and_the_oldest_request_first():
    planner = scheduler(max_preparing=3)
    add(planner, "a", "b", images=2)
    work = planner.start_encoding()
    assert work
    assert (work.request_id, work.image_index) == ("a", 0)
    assert planner.start_encoding() is None
    planner.abort("a")
    assert planner.start_encoding() is None, "the encoder is still at it"
    assert planner.encoded("a", FakeFeatures("late")) == []
    following = planner.start_encoding()
    assert following
    assert following.request_id == "b"


def test_an_older_prompt_that_becomes_ready_takes_turns_with_what_was_begun():
    planner = scheduler(max_preparing=3, prefill_chunk_tokens=2)
    runner = runner_for(planner)
    add(planner, "a", images=1)
    add(planner, "b", text="x" * 9)
    work = planner.start_encoding()
    assert work
    planner.update(plan := planner.schedule(), runner.execute(plan))
    planner.encoded("a", features_of(work.prompt.images[0]))
    add(planner, "c")
    course = ""
    while len(course) < 4:
        planner.update(plan := planner.schedule(), runner.execute(plan))
        course += plan.prefill.request_id if plan.prefill else ""
    assert course == "abab"


def test_text_passes_a_request_whose_picture_is_being_encoded():
    planner = scheduler(max_preparing=3)
    runner = runner_for(planner)
    add(planner, "a", images=1)
    add(planner, "b")
    assert planner.start_encoding()
    plan = planner.schedule()
    assert plan.prefill
    assert plan.prefill.request_id == "b"
    planner.update(plan, runner.execute(plan))


def test_a_picture_that_fails_ends_that_request_alone():
    planner = scheduler(max_preparing=3)
    runner = runner_for(planner)
    add(planner, "a", "b", images=1)
    work = planner.start_encoding()
    assert work
    failed = planner.encoded("a", InternalError("the picture failed"))
    assert terminals(failed) == ["a"]
    assert texts(run(planner, runner)) == {"b": answer_text(prompt(images=1))}
    assert planner.num_tracked == runner.num_tracked == 0


def test_chunks_shrink_to_the_time_of_a_step_while_others_wait():
    planner = scheduler(prefill_chunk_tokens=64, max_step_seconds=0.1, context_tokens=1000)
    runner = runner_for(planner)
    runner.seconds_per_token = 0.004
    add(planner, "a", text="x" * 64)
    while not planner.count(State.DECODE):
        beat(planner, runner)
    add(planner, "b", text="x" * 64)
    sizes = []
    while planner.count(State.PREFILL):
        plan = planner.schedule()
        assert plan.prefill
        sizes.append(plan.prefill.end - plan.prefill.start)
        planner.update(plan, runner.execute(plan))
    assert sizes == [32, 16, 16]  # 128 milliseconds are too much, and 64 are not


@pytest.mark.parametrize("images", [0, 1])
def test_a_chunk_that_fails_ends_that_request_alone(images: int):
    planner = scheduler(max_preparing=3)
    runner = runner_for(planner)
    runner.failing_prefills.add("b")
    add(planner, "a", "b", "c", images=images)
    events = run(planner, runner)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["b"]
    assert texts(events) == {name: answer_text(prompt(images=images)) for name in "ac"}
    assert planner.num_tracked == runner.num_tracked == 0


def test_a_decode_that_fails_ends_its_rows_and_not_the_prefill_beside():
    planner = scheduler(prefill_chunk_tokens=4, max_preparing=3)
    runner = runner_for(planner)
    add(planner, "a", "b", text="1234")
    while planner.count(State.DECODE) < 2:
        beat(planner, runner)
    add(planner, "c", text="1234")
    runner.fails_decode = True
    events = run(planner, runner)
    assert terminals(events)[:2] == ["a", "b"]
    assert terminals(events)[2:] == ["c"]
    assert texts(events)["c"] == answer_text(prompt("1234"))
    assert planner.num_tracked == runner.num_tracked == 0


def test_a_row_that_fails_gets_no_token_of_the_same_step():
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a")
    while not planner.count(State.DECODE):
        beat(planner, runner)
    plan = planner.schedule()
    result = StepResult({SeqId("a"): EOS}, {"a": InternalError("no")})
    assert planner.update(plan, result) == [Failed("a", "internal_error", "no")]


def test_tokens_of_a_request_that_is_gone_are_dropped():
    planner = scheduler()
    assert planner.update(SchedulerOutput(), StepResult({SeqId("gone"): 1})) == []


def test_draining_refuses_newcomers_and_finishes_the_others():
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a")
    planner.is_draining = True
    (refused,) = planner.add(submit("b"))
    assert isinstance(refused, Failed)
    assert refused.code == "engine_unavailable"
    assert texts(run(planner, runner)) == {"a": answer_text(prompt())}
    assert planner.num_tracked == 0


def test_a_released_row_is_named_once():
    planner = scheduler()
    runner = runner_for(planner)
    add(planner, "a")
    run(planner, runner)
    assert [plan.released for plan in runner.plans if plan.released] == [(SeqId("a"),)]


def test_a_request_that_the_runner_never_met_is_not_released():
    planner = scheduler()
    planner.add(submit("a"))
    planner.abort("a")
    assert not planner.has_runner_work
    assert planner.schedule().is_empty


# ---- an encode behind a prompt's last chunk ------------------------------------------


def test_the_next_picture_is_encoded_behind_the_last_chunk_of_a_prompt():
    planner = scheduler(max_preparing=3, prefill_chunk_tokens=4)
    runner = runner_for(planner)
    add(planner, "a", "b", images=1)
    work = planner.start_encoding()
    assert work
    planner.encoded("a", features_of(work.prompt.images[0]))
    begun = []
    while planner.count(State.PREFILL) == 2:
        assert planner.start_encoding() is None, "it is the prompt's turn"
        plan = planner.schedule()
        assert plan.prefill
        behind = planner.start_encoding_behind(plan)
        begun.append((plan.prefill.is_last, behind.request_id if behind else None))
        planner.update(plan, runner.execute(plan))
    assert len(begun) > 1
    assert begun == [(False, None)] * (len(begun) - 1) + [(True, "b")]
    assert planner.schedule().prefill is None, "its picture is not encoded yet"


def test_no_picture_is_encoded_behind_a_prompt_if_there_is_no_memory_for_both():
    class Tight:
        def admit(self, *_: object, **__: object) -> bool:
            return True

        def make_room_for_reserved(self, _: object) -> None:
            pass

        def fit_together(self, requests: Iterable[Request], _: object) -> bool:
            assert {one.request_id for one in requests} == {"a", "b"}
            return False

    planner = scheduler(max_preparing=3, prefill_chunk_tokens=64)
    planner._admission = Tight()  # type: ignore[assignment]
    add(planner, "a", "b", images=1)
    planner.admit()
    work = planner.start_encoding()
    assert work
    planner.encoded("a", features_of(work.prompt.images[0]))
    plan = planner.schedule()
    assert plan.prefill
    assert plan.prefill.is_last
    assert planner.start_encoding_behind(plan) is None
    planner.update(plan, runner_for(planner).execute(plan))
    following = planner.start_encoding()
    assert following
    assert following.request_id == "b"
