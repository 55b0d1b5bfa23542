"""The inference thread's loop with its real threads beside it, and a fake model."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from tests.unit.engine.fakes import (
    ByteDecoder,
    FakeEncoder,
    FakeFeatures,
    FakeMemory,
    FakePreparer,
    FakeProcess,
    FakeRunner,
    FakeStep,
    answer_text,
    answer_texts,
    config,
    header_pixels,
    outcome_of,
    prompt,
    submit,
)
from vlm_server.cache.caches import Caches
from vlm_server.engine.encoding import encode
from vlm_server.engine.inbox import Inbox
from vlm_server.engine.loop import EngineLoop
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.scheduler.scheduler import Scheduler
from vlm_server.engine.threads import DiskReaderThread, EncoderThread, PreparerThreads
from vlm_server.errors import EngineBroken, InternalError
from vlm_server.interfaces import (
    EncodeWork,
    Prepared,
    SchedulerOutput,
    SeqId,
    StepResult,
)
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.protocol import (
    Abort,
    Accepted,
    Deadlines,
    Drain,
    Event,
    Failed,
    Finished,
    OnDevice,
    Stats,
    Submit,
)
from vlm_server.settings import MemorySettings


class ThreadedEngine:
    """A loop with its real threads around fakes, and all its events."""

    def __init__(
        self,
        threads: int = 2,
        memory: MemorySettings | None = None,
        preparer: FakePreparer | None = None,
        encoder: FakeEncoder | None = None,
        runner: FakeRunner | None = None,
    ) -> None:
        limits = config(max_preparing=threads)
        self.preparer = preparer or FakePreparer()
        self.encoder = encoder or FakeEncoder()
        self.runner = runner or FakeRunner(limits.max_num_seqs, limits.prefill_chunk_tokens)
        caches, self.inbox, self.events = Caches(), Inbox(), list[Event]()
        self.memory = FakeMemory()
        settings = memory or MemorySettings()
        governor = self.governor = Governor(settings, self.memory, FakeProcess(), caches)
        admission = Admission(governor, self.runner.kv_bytes, limits.prefill_chunk_tokens)
        self.scheduler = Scheduler(
            limits,
            ByteDecoder(),
            caches,
            admission,
            header_pixels,
            self.runner.max_piggybacked_tokens,
        )
        self.loop = EngineLoop(
            self.inbox,
            self.scheduler,
            self.runner,
            PreparerThreads(self.preparer, self.inbox, threads),
            DiskReaderThread(caches, self.inbox),
            EncoderThread(self.encoder, self.inbox),
            governor,
            self.events.append,
            max_failed_steps=3,
        )
        self.thread = threading.Thread(target=self.loop.run, daemon=True)

    @classmethod
    def with_hanging_encoder(cls) -> ThreadedEngine:
        """A running engine whose encoder waits until its gate is set."""
        engine = cls()
        engine.encoder.gate.clear()
        engine.thread.start()
        return engine

    @classmethod
    def with_hanging_preparer(cls) -> ThreadedEngine:
        """A running engine whose preparer waits until its gate is set."""
        engine = cls()
        engine.preparer.gate.clear()
        engine.thread.start()
        return engine

    @property
    def num_tracked(self) -> int:
        return self.scheduler.stats().tracked + self.runner.num_tracked

    def wait_for(self, kind: type[Event], request_id: str | None = None) -> Event:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for event in list(self.events):
                if isinstance(event, kind) and getattr(event, "request_id", None) == request_id:
                    return event
            time.sleep(0.001)
        raise AssertionError(f"no {kind.__name__} of {request_id} in {self.events}")

    def wait_for_preparation(self) -> None:
        """Wait until a thread has begun a preparation."""
        deadline = time.monotonic() + 10
        while not self.preparer.num_running:
            assert time.monotonic() < deadline, "nothing is prepared"
            time.sleep(0.001)

    def drain(self) -> None:
        self.inbox.put(Drain())
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def engine() -> Iterator[ThreadedEngine]:
    threaded_engine = ThreadedEngine()
    yield threaded_engine
    threaded_engine.preparer.gate.set()


def test_requests_posted_together_are_all_answered(engine: ThreadedEngine):
    for n in range(10):
        engine.inbox.put(submit(f"r{n}", f"text {n}", n % 3))
    engine.loop.run_until_idle()
    expected = {f"r{n}": answer_text(prompt(f"text {n}", n % 3)) for n in range(10)}
    assert answer_texts(engine.events) == expected
    assert engine.preparer.most_running <= 2
    assert engine.num_tracked == 0


def test_accepted_event_is_first_and_finished_event_last(engine: ThreadedEngine):
    engine.inbox.put(submit("a"))
    engine.loop.run_until_idle()
    kinds = [type(event) for event in engine.events if not isinstance(event, Stats | OnDevice)]
    assert kinds[0] is Accepted
    assert kinds[-1] is Finished
    assert kinds.count(Finished) == kinds.count(Accepted) == 1


def test_refused_preparation_names_its_reason(engine: ThreadedEngine):
    engine.inbox.put(submit("a", "refuse this"))
    engine.loop.run_until_idle()
    assert engine.wait_for(Failed, "a") == Failed("a", "invalid_value", "refused", "messages[0]")


@pytest.mark.parametrize("text", ["crash here", "panic here"])
def test_crashed_preparer_fails_only_its_request(engine: ThreadedEngine, text: str):
    engine.inbox.put(submit("a", text))
    engine.inbox.put(submit("b"))
    engine.loop.run_until_idle()
    failed = engine.wait_for(Failed, "a")
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    assert "bug" not in failed.message
    assert answer_texts(engine.events)["b"] == answer_text(prompt())


def test_slow_preparation_does_not_delay_other_requests():
    engine = ThreadedEngine(threads=1)
    engine.thread.start()
    engine.inbox.put(submit("a"))
    engine.wait_for(Finished, "a")
    engine.preparer.gate.clear()
    engine.inbox.put(submit("slow"))
    engine.wait_for(Accepted, "slow")
    engine.inbox.put(submit("later"))
    engine.wait_for(Accepted, "later")
    engine.inbox.put(Abort("later"))
    engine.wait_for(Finished, "later")
    engine.preparer.gate.set()
    engine.wait_for(Finished, "slow")
    engine.drain()


def test_text_is_prepared_while_images_occupy_all_preparers():
    class SlowWithImages(FakePreparer):
        def prepare(
            self, submit: Submit, cancellation: Cancellation, *, use_disk: bool = True
        ) -> Prepared:
            if submit.has_media:
                return super().prepare(submit, cancellation)
            return outcome_of(submit)

    engine = ThreadedEngine(threads=1, preparer=SlowWithImages())
    engine.preparer.gate.clear()
    engine.thread.start()
    engine.inbox.put(submit("image", images=1))
    engine.inbox.put(submit("text"))
    engine.wait_for(Finished, "text")
    engine.preparer.gate.set()
    engine.wait_for(Finished, "image")
    engine.drain()


def test_waiting_loop_wakes_for_deadline():
    engine = ThreadedEngine.with_hanging_preparer()
    submitted = msgspec.structs.replace(submit("a"), deadlines=Deadlines(queue_timeout_seconds=0.2))
    started = time.monotonic()
    engine.inbox.put(submitted)
    failed = engine.wait_for(Failed, "a")
    assert isinstance(failed, Failed)
    assert failed.code == "queue_timeout"
    assert 0.2 <= time.monotonic() - started < 0.9, "not only with the next stats"
    assert engine.preparer.cancelled_ids == ["a"]
    engine.preparer.gate.set()
    engine.inbox.put(submit("b"))
    engine.wait_for(Finished, "b")
    engine.drain()


def test_abort_during_preparation_is_answered_at_once():
    engine = ThreadedEngine.with_hanging_preparer()
    engine.inbox.put(submit("a"))
    engine.wait_for(Accepted, "a")
    engine.wait_for_preparation()
    engine.inbox.put(Abort("a"))
    finished = engine.wait_for(Finished, "a")
    assert isinstance(finished, Finished)
    assert finished.is_aborted
    assert engine.preparer.cancelled_ids == ["a"]
    engine.preparer.gate.set()
    engine.inbox.put(submit("b"))
    engine.wait_for(Finished, "b")
    engine.drain()
    assert "a" not in answer_texts(engine.events)


def test_aborted_preparations_do_not_delay_next():
    engine = ThreadedEngine.with_hanging_preparer()
    for n in range(20):
        engine.inbox.put(submit(f"r{n}"))
        engine.inbox.put(Abort(f"r{n}"))
        engine.wait_for(Finished, f"r{n}")
    engine.inbox.put(submit("good"))
    engine.wait_for(Accepted, "good")
    engine.preparer.gate.set()
    engine.wait_for(Finished, "good")
    engine.drain()
    assert len(engine.preparer.prepared_ids) <= 3, "work for requests that were gone"


def test_drain_finishes_running_requests_refuses_new_and_ends():
    engine = ThreadedEngine.with_hanging_preparer()
    engine.inbox.put(submit("a", images=2))
    engine.wait_for(Accepted, "a")
    engine.inbox.put(Drain())
    engine.inbox.put(submit("late"))
    refused = engine.wait_for(Failed, "late")
    assert isinstance(refused, Failed)
    assert refused.code == "engine_unavailable"
    engine.preparer.gate.set()
    engine.thread.join(10)
    assert not engine.thread.is_alive()
    assert answer_texts(engine.events) == {"a": answer_text(prompt(images=2))}


def test_crashed_encoder_fails_only_its_request():
    engine = ThreadedEngine()
    engine.encoder.fails = True
    engine.thread.start()
    engine.inbox.put(submit("a", images=1))
    engine.inbox.put(submit("b"))
    failed = engine.wait_for(Failed, "a")
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    engine.wait_for(Finished, "b")
    engine.drain()


def test_failed_image_of_encode_batch_fails_alone():
    encoder, threaded_engine = FakeEncoder(bad={"1"}), prompt(images=3)
    inputs = {"pixel_values": np.zeros((1, 2), np.float32)}
    works = [EncodeWork("a", index, threaded_engine, inputs) for index in range(3)]
    done = encode(encoder, works)
    assert encoder.calls == [3, 1, 1, 1]
    assert done.seconds == math.inf, "it is no measure"
    failed = [isinstance(one, InternalError) for one in done.outcomes]
    assert failed == [False, True, False]
    assert encode(encoder, works[:1]).seconds != math.inf


def test_text_decodes_while_image_is_encoded():
    engine = ThreadedEngine.with_hanging_encoder()
    engine.inbox.put(submit("a", images=1))
    engine.inbox.put(submit("b"))
    engine.wait_for(Finished, "b")
    engine.encoder.gate.set()
    engine.wait_for(Finished, "a")
    engine.drain()


def test_drain_ends_idle_engine():
    engine = ThreadedEngine()
    engine.thread.start()
    engine.drain()


def draining() -> ThreadedEngine:
    """An engine that drains while a request is being prepared."""
    engine = ThreadedEngine.with_hanging_preparer()
    engine.inbox.put(submit("a"))
    engine.wait_for(Accepted, "a")
    engine.inbox.put(Drain())
    return engine


def test_drain_lets_runner_store_last_answer():
    engine = draining()
    engine.preparer.gate.set()
    engine.thread.join(10)
    assert engine.runner.plans[-1].finished_seqs == (SeqId("a"),)
    assert engine.num_tracked == 0


def test_drain_ends_when_last_request_is_aborted():
    engine = draining()
    engine.inbox.put(Abort("a"))
    engine.thread.join(10)
    assert not engine.thread.is_alive()
    engine.preparer.gate.set()


def test_stats_return_to_zero_when_idle():
    engine = ThreadedEngine()
    engine.thread.start()
    engine.inbox.put(submit("a", images=1))
    engine.wait_for(Finished, "a")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stats = [event for event in engine.events if isinstance(event, Stats)]
        if stats and stats[-1].tracked == 0 and stats[-1].generated_tokens:
            break
        time.sleep(0.001)
    last = stats[-1]
    assert set(last.requests) == {
        *("waiting", "preparing", "waiting_for_memory", "reading_disk"),
        *("encoding", "prefill", "decode"),
    }
    assert not any(last.requests.values())
    assert last.tracked == 0
    assert last.generated_tokens == 1 + len(answer_text(prompt(images=1)).encode())
    engine.drain()


def test_idle_engine_sends_no_event_twice():
    engine = ThreadedEngine()
    engine.thread.start()
    engine.inbox.put(Abort("nobody"))
    engine.inbox.put(Abort("nobody"))
    time.sleep(0.05)
    engine.drain()
    assert len(engine.events) <= 1


def test_exception_of_runner_ends_loop():
    class Broken(FakeRunner):
        def launch(self, plan: SchedulerOutput) -> FakeStep:
            raise RuntimeError("the device is gone")

    engine = ThreadedEngine(runner=Broken(1, 1))
    engine.inbox.put(submit("a"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.loop.run()


# ---- announcements of work on the device ---------------------------------------------


def announced(engine: ThreadedEngine) -> list[set[str]]:
    """The request ids of each announcement of device work."""
    found = [set(event.request_ids) for event in engine.events if isinstance(event, OnDevice)]
    return [request_ids for request_ids, _ in itertools.groupby(found) if request_ids]


def test_end_of_all_device_work_is_announced(engine: ThreadedEngine):
    engine.inbox.put(submit("a", images=1))
    engine.loop.run_until_idle()
    engine.inbox.put(Abort("nobody"))
    engine.loop.step()
    assert [event for event in engine.events if isinstance(event, OnDevice)] == [
        OnDevice(encoding=("a",)),
        OnDevice(("a",)),
        OnDevice(is_decoding=True),
        OnDevice(),
    ]


class WatchedRunner(FakeRunner):
    """Notes what was announced when a chunk was launched, and when its result was read."""

    def __init__(self, max_num_seqs: int, chunk_tokens: int) -> None:
        super().__init__(max_num_seqs, chunk_tokens)
        self.engine: ThreadedEngine
        self.at_launch: list[list[set[str]]] = []
        self.at_result: list[list[set[str]]] = []

    def launch(self, plan: SchedulerOutput) -> FakeStep:
        step = super().launch(plan)
        if not plan.prefills:
            return step
        self.at_launch.append(announced(self.engine))
        result = step.result

        def watched() -> StepResult:
            self.at_result.append(announced(self.engine))
            return result()

        step.result = watched  # type: ignore[method-assign]
        return step


def watched_engine(chunk_tokens: int) -> tuple[ThreadedEngine, WatchedRunner]:
    runner = WatchedRunner(3, chunk_tokens)
    runner.engine = ThreadedEngine(runner=runner)
    return runner.engine, runner


def test_encode_during_chunk_is_announced_after_launch():
    engine, runner = watched_engine(512)
    engine.inbox.put(submit("a", images=1))
    engine.inbox.put(submit("b", images=1))
    engine.encoder.gate.clear()
    while engine.scheduler.stats().requests["encoding"] < 2:
        engine.loop.step()
    engine.encoder.gate.set()
    engine.loop.run_until_idle()
    both = zip(runner.at_launch, runner.at_result, strict=True)
    at_launch, at_result = next(one for one in both if one[0] != one[1])
    assert at_launch == [{"a"}]
    assert at_result == [{"a"}, {"a", "b"}]


def test_prompt_is_announced_once_before_its_first_chunk():
    engine, runner = watched_engine(5)
    engine.inbox.put(submit("a", "a prompt of several chunks"))
    engine.loop.run_until_idle()
    assert len(runner.at_launch) == 6
    assert runner.at_launch == [[{"a"}]] * 6
    assert announced(engine) == [{"a"}]


def test_image_is_announced_before_its_encode():
    announcements: list[list[set[str]]] = []

    class Watched(FakeEncoder):
        def encode(self, works: Sequence[EncodeWork]) -> list[FakeFeatures]:
            announcements.append(announced(engine))
            return super().encode(works)

    engine = ThreadedEngine(encoder=Watched())
    engine.inbox.put(submit("a", images=2))
    engine.loop.run_until_idle()
    assert announcements == [[{"a"}]] * 2
    assert announced(engine) == [{"a"}]


def test_announcement_names_exactly_requests_on_device():
    engine = ThreadedEngine.with_hanging_encoder()
    engine.inbox.put(submit("a", images=1))
    engine.wait_for(Accepted, "a")
    while not announced(engine):
        time.sleep(0.001)
    engine.inbox.put(submit("b"))
    engine.wait_for(Finished, "b")
    while announced(engine)[-1] != {"a"}:  # one step more, of a row that leaves
        time.sleep(0.001)
    engine.encoder.gate.set()
    engine.wait_for(Finished, "a")
    engine.inbox.put(submit("c"))
    engine.wait_for(Finished, "c")
    engine.drain()
    assert announced(engine) == [{"a"}, {"a", "b"}, {"a"}, {"c"}]


def test_request_waiting_for_encoder_is_not_announced():
    engine = ThreadedEngine.with_hanging_encoder()
    engine.inbox.put(submit("a", images=1))
    engine.wait_for(Accepted, "a")
    while not announced(engine):
        time.sleep(0.001)
    engine.inbox.put(submit("b", images=1))
    engine.inbox.put(submit("c"))
    engine.wait_for(Finished, "c")
    assert {"a", "c"} in announced(engine)
    assert "b" not in set.union(*announced(engine))
    engine.encoder.gate.set()
    engine.wait_for(Finished, "b")
    engine.drain()
    assert {"b"} in announced(engine)


# ---- heartbeats of hung threads ------------------------------------------------------


def at_work(engine: ThreadedEngine) -> list[dict[str, int]]:
    return [event.at_work for event in list(engine.events) if isinstance(event, Stats)]


def wait_for_signs(engine: ThreadedEngine, kind: str, count: int) -> set[int]:
    """The numbers of `kind` in that many signs of life to come."""
    begun = len(at_work(engine))
    deadline = time.monotonic() + 30
    while len(at_work(engine)) < begun + count:
        assert time.monotonic() < deadline, "no sign of life"
        time.sleep(0.01)
    return {numbers[kind] for numbers in at_work(engine)[-count:]}


def wait_for_rest(engine: ThreadedEngine) -> None:
    deadline = time.monotonic() + 30
    while at_work(engine)[-1]:
        assert time.monotonic() < deadline, "it is never said that nothing is left to do"
        time.sleep(0.01)
    engine.drain()


def test_hanging_encoder_keeps_its_heartbeat_number_after_abort():
    """The supervisor's watchdog has no other sign of the hang."""
    engine = ThreadedEngine.with_hanging_encoder()
    engine.inbox.put(submit("a", images=1))
    while not announced(engine):
        time.sleep(0.001)
    engine.inbox.put(submit("text"))
    engine.wait_for(Finished, "text")
    engine.inbox.put(Abort("a"))
    engine.wait_for(Finished, "a")
    assert len(wait_for_signs(engine, "encoder", 2)) == 1
    engine.encoder.gate.set()
    wait_for_rest(engine)


def test_hanging_preparer_keeps_its_heartbeat_number():
    engine = ThreadedEngine.with_hanging_preparer()
    engine.inbox.put(submit("a", images=1))
    assert len(wait_for_signs(engine, "preparers", 1)) == 1
    engine.inbox.put(submit("b", images=1))
    engine.inbox.put(Abort("a"))
    engine.inbox.put(Abort("b"))
    engine.wait_for(Finished, "b")
    assert len(wait_for_signs(engine, "preparers", 2)) == 1
    engine.preparer.gate.set()
    wait_for_rest(engine)


# ---- steps that fail -----------------------------------------------------------------


def run_in_turn(engine: ThreadedEngine, *names: str) -> None:
    """One request after the other; those named `bad...` fail at their first chunk."""
    for name in names:
        if name.startswith("bad"):
            engine.runner.failing_prefills.add(name)
        engine.inbox.put(submit(name))
        engine.loop.run_until_idle()


def test_consecutive_failed_steps_end_loop_with_reason(engine: ThreadedEngine):
    run_in_turn(engine, "bad 1", "bad 2")
    with pytest.raises(EngineBroken, match=r"3 steps in a row failed.*the chunk failed"):
        run_in_turn(engine, "bad 3")
    for name in ("bad 1", "bad 2", "bad 3"):
        failed = engine.wait_for(Failed, name)
        assert isinstance(failed, Failed)
        assert failed.code == "internal_error"


def test_successful_step_resets_count_of_failures(engine: ThreadedEngine):
    run_in_turn(engine, "bad 1", "bad 2", "good", "bad 3", "bad 4", "fine", "bad 5", "bad 6")
    assert answer_texts(engine.events) == {
        "good": answer_text(prompt()),
        "fine": answer_text(prompt()),
    }


def test_failing_requests_do_not_end_loop_that_decodes():
    """In each step a chunk fails; a sequence that decodes beside it shows that the model works."""

    class Slow(FakeRunner):  # the sequence must not end before the others are prepared
        def launch(self, plan: SchedulerOutput) -> FakeStep:
            time.sleep(0.002)
            return super().launch(plan)

    engine = ThreadedEngine(runner=Slow(3, 5))
    engine.inbox.put(submit("good", max_tokens=150, ignore_eos=True))
    while not engine.runner.seqs:
        engine.loop.step()
    engine.runner.failing_prefills.update(f"bad {n}" for n in range(9))
    for n in range(9):
        engine.inbox.put(submit(f"bad {n}"))
    engine.loop.run_until_idle()
    good = engine.wait_for(Finished, "good")
    assert isinstance(good, Finished)
    assert good.usage.completion_tokens == 150


def test_repeated_decode_failures_end_loop(engine: ThreadedEngine):
    def fail_the_first_decode(name: str) -> None:
        engine.inbox.put(submit(name))
        while not engine.runner.seqs:
            engine.loop.step()
        engine.runner.fails_decode = True
        engine.loop.run_until_idle()

    fail_the_first_decode("a")
    fail_the_first_decode("b")
    with pytest.raises(EngineBroken, match="decode failed"):
        fail_the_first_decode("c")


def test_idle_engine_launches_no_plan(engine: ThreadedEngine):
    engine.loop.run_until_idle()
    assert not engine.runner.plans


def test_engine_is_idle_after_its_last_sequence_has_left(monkeypatch: pytest.MonkeyPatch):
    """Memory that a sequence still held could not be freed, and no later step would try again."""
    engine = ThreadedEngine(memory=MemorySettings(idle_clear_seconds=0))
    held = list[int]()
    monkeypatch.setattr(
        engine.governor, "clear_when_idle", lambda: held.append(engine.runner.num_tracked)
    )
    engine.inbox.put(submit("a"))
    engine.loop.run_until_idle()
    engine.inbox.put(Drain())
    engine.loop.step()
    assert held
    assert set(held) == {0}


def test_idle_engine_frees_memory_for_other_programs(monkeypatch: pytest.MonkeyPatch):
    """Without any request, where memory is the machine's."""
    monkeypatch.setattr("vlm_server.engine.memory.governor._DRIVER_SECONDS", 0.02)
    engine = ThreadedEngine(memory=MemorySettings(idle_clear_seconds=3600))
    engine.memory.is_shared, engine.memory.pool_bytes = True, 1 << 30
    engine.thread.start()
    engine.inbox.put(submit("a"))
    engine.wait_for(Finished, "a")
    assert engine.memory.num_clears == 0
    engine.memory.others_need_some = True
    deadline = time.monotonic() + 10
    while not engine.memory.num_clears and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.memory.num_clears == 1
    engine.drain()
