"""The entries of a prompt on disk are read once memory is reserved for them."""

from __future__ import annotations

from tests.unit.cache.fakes import FakeDisk, LoadedSource
from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import FakeMemory, answer_text, answer_texts, prompt
from tests.unit.engine.scheduler.situations import FEATURES, caches_on, use_disk
from vlm_server.engine.request.states import State
from vlm_server.errors import OutOfMemory
from vlm_server.protocol import OnDevice


def states_of(engine: SteppedEngine, name: str) -> list[State]:
    """The states of a request after each step, until all requests have ended."""
    passed_states = list[State]()
    while not engine.ended:
        engine.step()
        state = engine.state_of(name)
        if state and passed_states[-1:] != [state]:
            passed_states.append(state)
    return passed_states


def test_disk_entries_are_read_after_admission_and_not_recomputed():
    source = LoadedSource(prompt("a longer", 2).key)
    disk = FakeDisk(FEATURES, source)
    engine = SteppedEngine(caches_on(disk))
    use_disk(engine)
    engine.disk_reader.is_fast = False
    engine.add("a", text="a longer prompt", images=2)
    engine.step_until(lambda: engine.state_of("a") is State.READING_DISK)
    assert not [call for call in disk.calls if call.startswith("load")]
    assert engine.request("a").disk_read_bytes == len(source.prompt_key)
    engine.disk_reader.finish()
    engine.run()
    assert answer_texts(engine.events) == {"a": answer_text(prompt("a longer prompt", 2))}
    assert engine.runner.num_cached_tokens["a"] == len(source.prompt_key)
    assert engine.encoder.done == []
    assert engine.is_clean()


def test_request_with_missing_disk_files_is_prepared_again():
    """The first preparation left out the pixels, since the disk had the features."""

    class Forgetful(FakeDisk):
        def read_features(self, key: str) -> None:
            return None

    engine = SteppedEngine(caches_on(Forgetful(FEATURES)))
    use_disk(engine)
    engine.add("a", text="a longer prompt", images=2)
    assert states_of(engine, "a")[:2] == [State.PREPARING, State.READING_DISK]
    assert answer_texts(engine.events) == {"a": answer_text(prompt("a longer prompt", 2))}
    assert len(engine.disk_reader.done) == 1
    assert len(engine.encoder.done) == 2
    engine.run()
    assert engine.is_clean()


def test_disk_reads_are_for_one_request_at_once():
    engine = SteppedEngine(caches_on(FakeDisk(FEATURES)))
    use_disk(engine)
    engine.disk_reader.is_fast = False
    engine.add("a", "b", text="a longer prompt", images=2)
    engine.step_until(lambda: engine.count(State.READING_DISK) == 2)
    engine.step()
    assert engine.disk_reader.work is not None
    assert engine.disk_reader.work.request_id == "a"
    assert OnDevice(reading=("a",)) in engine.events, "the read of `a` is to blame for a crash"
    engine.disk_reader.finish()
    engine.step()
    assert engine.disk_reader.work.request_id == "b"
    engine.disk_reader.is_fast = True
    engine.disk_reader.finish()
    engine.run()
    assert sorted(engine.ended) == ["a", "b"]
    assert engine.is_clean()


def test_disk_read_is_skipped_without_memory_to_reserve():
    """What does not fit beside the request is computed instead."""
    prepared_prompt = prompt("a longer prompt", 2)
    needed = prepared_prompt.num_tokens + 10 + sum(one.size_bytes for one in FEATURES.values())
    for room, num_reads in ((needed, 0), (needed + 2 * 8, 1)):
        memory = FakeMemory(active_bytes=1000, limit_bytes=1000 + room)
        engine = SteppedEngine(caches_on(FakeDisk(FEATURES)), memory=memory)
        engine.governor.reset_stats()
        use_disk(engine)
        engine.add("a", text="a longer prompt", images=2, max_tokens=10)
        engine.run()
        assert len(engine.disk_reader.done) == num_reads
        assert len(engine.encoder.done) == 2 - 2 * num_reads
        assert answer_texts(engine.events)["a"] == answer_text(prepared_prompt, 10)


def test_disk_read_out_of_memory_frees_caches_and_recomputes():
    class Short(FakeDisk):
        def read_features(self, key: str) -> None:
            raise OutOfMemory("no memory")

    engine = SteppedEngine(caches_on(Short(FEATURES)))
    use_disk(engine)
    engine.add("a", text="a longer prompt", images=2)
    engine.run()
    assert answer_texts(engine.events) == {"a": answer_text(prompt("a longer prompt", 2))}
    assert engine.governor.stats().decisions["clear_failure"] == 1
    assert engine.is_clean()
