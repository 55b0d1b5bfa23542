"""The engine's threads on real models: what is prepared and encoded beside steps is as alone."""

from __future__ import annotations

from collections import defaultdict
from queue import SimpleQueue

import mlx.core as mx
import pytest

from tests.integration.harness import GREEDY, Engine, ask
from tests.integration.test_families import PROMPTS
from vlm_server import settings
from vlm_server.engine.loop import EngineLoop, Inbox
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Abort, Event, Failed, Finished, Start, Stats, Tokens
from vlm_server.runner.device.device import current_device
from vlm_server.runner.device.memory import MlxMemory, make_caches
from vlm_server.runner.model.load import LoadedModel
from vlm_server.worker.start import build_loop

Served = tuple[LoadedModel, MultimodalPreparer]


class Outbox:
    """In the place of the socket to the front."""

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.events: list[Event] = []

    def send(self, event: Event) -> None:
        self.events.append(event)

    @property
    def texts(self) -> dict[str, str]:
        found: dict[str, str] = defaultdict(str)
        for event in self.events:
            for delta in event.deltas if isinstance(event, Tokens) else ():
                found[delta.request_id] += delta.text
        return found

    @property
    def ends(self) -> dict[str, Finished | Failed]:
        return {e.request_id: e for e in self.events if isinstance(e, Finished | Failed)}


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def loop(served: Served, outbox: Outbox) -> EngineLoop:
    start = Start(
        model=settings.Model(),
        scheduler=settings.Scheduler(prefill_chunk_tokens=24, max_num_seqs=4, preparer_threads=3),
        engine=settings.Engine(),
        log=settings.Log(),
    )
    memory = MlxMemory(start.memory, current_device())
    caches = make_caches(start.cache, memory, served[0].language_model)
    return build_loop(start, served[0], memory, caches, outbox)  # type: ignore[arg-type]


def test_a_crowd_gets_what_each_would_get_alone(served: Served, loop: EngineLoop, outbox: Outbox):
    alone = Engine(*served)
    for name, parts in PROMPTS.items():
        alone.answer(ask(name, *parts))
    for number in range(4):
        for name, parts in PROMPTS.items():
            loop.post(ask(f"{name} {number}", *parts, sampling=GREEDY))
    for _ in range(6):
        loop.turn()
    for name in PROMPTS:
        loop.post(Abort(f"{name} 1"))
    loop.run_until_idle()
    told = {name: {outbox.texts[f"{name} {number}"] for number in (0, 2, 3)} for name in PROMPTS}
    assert told == {name: {alone.texts[name]} for name in PROMPTS}
    assert len(outbox.ends) == 4 * len(PROMPTS)
    assert all(isinstance(end, Finished) for end in outbox.ends.values())


def test_a_crowd_leaves_no_memory(loop: EngineLoop, outbox: Outbox):
    def crowd(name: str) -> int:
        for number in range(6):
            loop.post(ask(f"{name} {number}", *PROMPTS["pictures"], sampling=GREEDY))
        loop.run_until_idle()
        mx.synchronize()
        return mx.get_active_memory()

    baseline = crowd("first")
    assert crowd("second") <= baseline * 1.01
    assert not [event for event in outbox.events if isinstance(event, Stats) and event.tracked > 6]
