"""The engine's threads on real models: preparing and encoding beside steps changes no answer."""

from __future__ import annotations

import time

import pytest

from tests.integration.harness import GREEDY, EngineHarness, ask
from tests.integration.prompts import PROMPTS
from tests.integration.threaded_engine import ThreadedEngine
from tests.support.active_memory import active_bytes
from vlm_server import settings
from vlm_server.interfaces import SchedulerOutput, StepResult
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Abort, Finished, Start, Stats
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model_runner import LaunchedStep

pytestmark = pytest.mark.families("caches", "turns")


@pytest.fixture
def crowded_engine(served: tuple[LoadedModel, MultimodalPreparer]) -> ThreadedEngine:
    start = Start(
        model=settings.ModelSettings(),
        scheduler=settings.SchedulerSettings(
            prefill_chunk_tokens=24, max_num_seqs=4, preparer_threads=3
        ),
        engine=settings.EngineSettings(),
        log=settings.Log(),
    )
    return ThreadedEngine(served[0], start)


def test_threaded_loop_answers_crowd_as_alone(
    served: tuple[LoadedModel, MultimodalPreparer], crowded_engine: ThreadedEngine
):
    alone = EngineHarness(*served)
    for name, parts in PROMPTS.items():
        alone.answer(ask(name, *parts))
    for number in range(4):
        for name, parts in PROMPTS.items():
            crowded_engine.inbox.put(ask(f"{name} {number}", *parts, sampling=GREEDY))
    for _ in range(6):
        crowded_engine.loop.step()
    for name in PROMPTS:
        crowded_engine.inbox.put(Abort(f"{name} 1"))
    crowded_engine.loop.run_until_idle()
    texts = crowded_engine.texts
    told = {name: {texts[f"{name} {number}"] for number in (0, 2, 3)} for name in PROMPTS}
    assert told == {name: {alone.texts[name]} for name in PROMPTS}
    assert len(crowded_engine.ends) == 4 * len(PROMPTS)
    assert all(isinstance(end, Finished) for end in crowded_engine.ends.values())


def test_threaded_loop_releases_memory_of_crowd(crowded_engine: ThreadedEngine):
    def crowd(name: str) -> int:
        for number in range(6):
            crowded_engine.inbox.put(ask(f"{name} {number}", *PROMPTS["images"], sampling=GREEDY))
        crowded_engine.loop.run_until_idle()
        return active_bytes()

    baseline = crowd("first")
    assert crowd("second") <= baseline * 1.01
    assert not [e for e in crowded_engine.events if isinstance(e, Stats) and e.tracked > 6]


def test_prefill_seconds_include_time_between_launch_and_result(
    served: tuple[LoadedModel, MultimodalPreparer],
):
    """Includes waits between the chunk's launch and its result."""
    engine = EngineHarness(*served)
    seconds = list[float]()
    launch, finish = engine.runner.launch, engine.runner.finish

    def slow_launch(plan: SchedulerOutput) -> LaunchedStep:
        step = launch(plan)
        if plan.prefills:
            time.sleep(0.2)
        return step

    def noting_finish(step: LaunchedStep) -> StepResult:
        result = finish(step)
        if step.plan.prefills:
            seconds.append(result.prefill_seconds)
        return result

    engine.runner.launch = slow_launch  # type: ignore[method-assign]
    engine.runner.finish = noting_finish  # type: ignore[method-assign]
    engine.answer(ask("a", "Hi"))
    assert len(seconds) == 1
    assert seconds[0] > 0.2
