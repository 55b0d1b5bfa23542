"""Warm-up requests cover all media of the family and leave nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.integration.harness import ask
from tests.integration.threaded_engine import ThreadedEngine
from tests.support.image_files import image_of
from tests.support.whole_run import few_of
from vlm_server import settings
from vlm_server.cache.caches import Caches
from vlm_server.engine.loop import EngineLoop
from vlm_server.engine.start import end_warm_up
from vlm_server.engine.warm_up import WarmUpStage, stages, warm_up
from vlm_server.errors import EngineBroken, ModelLoadError
from vlm_server.interfaces import NewRequest, SchedulerOutput
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Event, Finished, Start
from vlm_server.runner import model_runner
from vlm_server.runner.decode.wide_step import WideStep
from vlm_server.runner.loaded import LoadedModel

Loaded = tuple[LoadedModel, MultimodalPreparer]

START = Start(
    settings.ModelSettings(),
    settings.SchedulerSettings(),
    settings.EngineSettings(),
    settings.Log(),
)


@pytest.fixture(params=few_of(["qwen3_vl", "qwen2_5_vl", "qwen3_5"], ["qwen3_5"]))
def loaded(request: pytest.FixtureRequest, load_tiny: Callable[[str], Loaded]) -> LoadedModel:
    return load_tiny(request.param)[0]


def units_encoded(caches: Caches) -> int:
    return caches.features.stats().entries


def test_warm_up_encodes_media_and_leaves_nothing(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
):
    served = ThreadedEngine(loaded, START)
    grown = {}
    for stage in stages(
        is_thorough=True, compiles=False, with_image=True, with_video=True, context_tokens=8192
    ):
        before = units_encoded(served.caches)
        assert warm_up(served.loop, stage)
        grown[stage.name] = units_encoded(served.caches) - before
    assert grown == {"text": 0, "a video": 2, "a picture": 1, "a cached prompt": 0}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    end_warm_up(served.loop, served.caches)
    assert served.events == [], "nobody else hears of it"
    stats = served.loop._stats()
    assert stats.generated_tokens == stats.prompt_tokens == stats.cached_tokens == 0
    assert not any(stats.tracked_by.values())
    assert not any(cache.entries or cache.hits or cache.misses for cache in stats.caches)


def test_warm_up_text_decodes_until_image_is_answered(loaded: LoadedModel):
    served = ThreadedEngine(loaded, START)
    stage = next(
        stage
        for stage in stages(
            is_thorough=True, compiles=False, with_image=True, with_video=True, context_tokens=8192
        )
        if len(stage.submits) > 1
    )
    text, image = (submit.request_id for submit in stage.submits)
    batches: list[int] = []
    launch = served.loop.runner.launch

    def noting(plan: SchedulerOutput) -> Any:
        batches.append(len(plan.decode))
        return launch(plan)

    served.loop.runner.launch = noting  # type: ignore[method-assign]
    events: list[Event] = []

    class Noting(EngineLoop):
        def _send_all(self, sent: Iterable[Event]) -> None:
            for event in sent:
                events.append(event)
                self.send(event)

    served.loop.__class__ = Noting
    warm_up(served.loop, stage)
    ends = {each.request_id: each for each in events if isinstance(each, Finished)}
    assert max(batches) == 2, "they were decoded in one batch"
    assert ends[text].is_aborted
    assert not ends[image].is_aborted


@pytest.mark.alone  # grammars that are late because of others are asked for no drafts
def test_warm_up_compiles_batched_prefill_and_drafts(
    load_tiny: Callable[[str], Loaded],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    """Batched prompts and rows of different lengths each need further compiled kernels."""
    served = ThreadedEngine(load_tiny("qwen2_5_vl")[0], START)
    together, wide = list[set[int]](), list[list[int]]()
    launch, take = model_runner.launch_batched, WideStep.result

    def noting_together(loaded: LoadedModel, requests: Sequence[NewRequest]) -> Any:
        together.append({one.prompt.num_tokens for one in requests})
        return launch(loaded, requests)

    def noting_wide(step: WideStep) -> Any:
        taken = take(step)
        wide.append([len(tokens) for tokens in taken[0]])
        return taken

    monkeypatch.setattr(model_runner, "launch_batched", noting_together)
    monkeypatch.setattr(WideStep, "result", noting_wide)
    for stage in stages(
        is_thorough=True, compiles=True, with_image=True, with_video=False, context_tokens=8192
    ):
        warm_up(served.loop, stage)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(len(lengths) > 1 for lengths in together)
    assert any(len(counts) == 1 < counts[0] for counts in wide)
    assert any(len(counts) == 2 and counts[0] != counts[1] for counts in wide)


def test_failed_warm_up_video_is_logged_and_tolerated(
    load_tiny: Callable[[str], Loaded], caplog: pytest.LogCaptureFixture
):
    start = replace(START, video=settings.VideoSettings(max_frame_pixels=1))
    served = ThreadedEngine(load_tiny("qwen3_vl")[0], start)
    for stage in stages(
        is_thorough=True, compiles=False, with_image=True, with_video=True, context_tokens=8192
    ):
        warm_up(served.loop, stage)
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "can't answer a prompt with a video" in record.getMessage()
    assert "1 pixels" in record.getMessage()


def test_warm_up_video_that_breaks_loop_is_tolerated(load_tiny: Callable[[str], Loaded]):
    served = ThreadedEngine(load_tiny("qwen3_vl")[0], START)
    video = next(
        stage
        for stage in stages(
            is_thorough=True, compiles=False, with_image=True, with_video=True, context_tokens=8192
        )
        if not stage.is_needed
    )

    class Breaks(EngineLoop):
        def run_until_idle(self) -> None:
            raise EngineBroken("1 steps in a row failed")

    served.loop.__class__ = Breaks
    assert not warm_up(served.loop, video)
    text = stages(
        is_thorough=True, compiles=False, with_image=True, with_video=True, context_tokens=8192
    )[0]
    with pytest.raises(EngineBroken):
        warm_up(served.loop, text)


def test_failed_required_warm_up_refuses_model(load_tiny: Callable[[str], Loaded]):
    served = ThreadedEngine(load_tiny("qwen3_vl")[0], START)
    broken = image_of(b"\x89PNG\r\n\x1a\n nothing", "PNG", 8, 8)
    stage = WarmUpStage("a picture", (ask("a picture", broken),))
    with pytest.raises(ModelLoadError, match="can't answer a picture: "):
        warm_up(served.loop, stage)


def test_quick_warm_up_is_one_small_image(loaded: LoadedModel):
    served = ThreadedEngine(loaded, START)
    (stage,) = stages(
        is_thorough=False, compiles=False, with_image=True, with_video=True, context_tokens=8192
    )
    warm_up(served.loop, stage)
    assert units_encoded(served.caches) == 1
    assert served.caches.features.stats().size_bytes < 64 << 10
    broken = image_of(b"\x89PNG\r\n\x1a\n nothing", "PNG", 8, 8)
    with pytest.raises(ModelLoadError):
        warm_up(served.loop, WarmUpStage("a picture", (ask("a", broken),)))


def test_warm_up_shows_no_video_to_families_without_video():
    assert "a video" not in [
        stage.name
        for stage in stages(
            is_thorough=True, compiles=False, with_image=True, with_video=False, context_tokens=8192
        )
    ]
