"""Situations that tests bring a scheduler into: files on disk, and a request in each state."""

from __future__ import annotations

from tests.unit.cache.fakes import FakeDisk
from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import FakeFeatures, prepared, prompt
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import State
from vlm_server.interfaces import Prepared
from vlm_server.protocol import Submit


def caches_on(disk: FakeDisk) -> Caches:
    caches = Caches(encoder_bytes=100, prefix_bytes=1000, open_disk=lambda: disk)
    caches.begin_serving()
    return caches


def use_disk(engine: SteppedEngine) -> None:
    """Have the preparers ask the engine's caches, and so the disk."""

    def prepare_from_disk(submit: Submit) -> Prepared:
        found = prompt(submit.messages[0].content[-1].text, len(submit.images))
        return prepared(found, engine.caches, use_disk=engine.preparers.use_disk)

    engine.preparers.outcome = prepare_from_disk


FEATURES = {f"{number}": FakeFeatures(f"features of {number}") for number in range(2)}


def bring_to_state(engine: SteppedEngine, state: State) -> None:
    """Bring request `a` there: two images, three chunks."""
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
    if state is State.READING_DISK:
        use_disk(engine)
        engine.disk_reader.is_fast = False
    engine.add("a", text="a longer text", images=2)
    engine.step_until(lambda: engine.state_of("a") is state)
    if state is State.PREFILL:
        engine.step_until(lambda: bool(engine.runner.prefills))


def finish_all(engine: SteppedEngine) -> None:
    engine.memory.active_bytes = 1
    engine.encoder.is_fast = engine.disk_reader.is_fast = True
    if engine.encoder.work:
        engine.encoder.finish()
    if engine.disk_reader.work:
        engine.disk_reader.finish()
    for name in list(engine.preparers.works):
        engine.preparers.finish(name)
    engine.preparers.outcome = SteppedEngine().preparers.outcome
    engine.run()
