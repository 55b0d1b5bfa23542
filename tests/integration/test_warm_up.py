"""The first requests of an engine: on all that its family takes, and gone without a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.integration.harness import ask, image_of
from tests.integration.test_loop import Outbox
from vlm_server import settings
from vlm_server.cache.caches import Caches
from vlm_server.engine.loop import EngineLoop
from vlm_server.errors import EngineBroken, ModelLoadError
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Start
from vlm_server.runner.device.device import current_device
from vlm_server.runner.device.memory import MlxMemory, make_caches
from vlm_server.runner.model.load import LoadedModel
from vlm_server.worker.start import build_loop
from vlm_server.worker.warm_up import Stage, stages, warm_up

Served = tuple[LoadedModel, MultimodalPreparer]

START = Start(settings.Model(), settings.Scheduler(), settings.Engine(), settings.Log())


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def loaded(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> LoadedModel:
    return load_tiny(request.param)[0]


def new_loop(loaded: LoadedModel, start: Start = START) -> tuple[EngineLoop, Caches]:
    memory = MlxMemory(start.memory, current_device())
    caches = make_caches(start.cache, memory, loaded.language_model)
    return build_loop(start, loaded, memory, caches, Outbox()), caches  # type: ignore[arg-type]


def units_encoded(caches: Caches) -> int:
    return caches.features.read().entries


def test_pictures_and_videos_are_encoded_and_nothing_stays(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
):
    loop, caches = new_loop(loaded)
    grown = {}
    for stage in stages(with_video=True):
        before = units_encoded(caches)
        warm_up(loop, stage)
        grown[stage.name] = units_encoded(caches) - before
    assert grown == {"text": 0, "a picture": 1, "a video": 1, "both": 1, "what is cached": 0}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    loop.reset_stats()
    stats = loop._stats()
    assert stats.generated_tokens == stats.prompt_tokens == stats.cached_tokens == 0
    assert not any(stats.tracked_by.values())
    assert not any(cache.entries or cache.hits or cache.misses for cache in stats.caches)


def test_a_video_that_fails_is_told_and_refuses_nobody(
    load_tiny: Callable[[str], Served], caplog: pytest.LogCaptureFixture
):
    start = replace(START, video=settings.Video(max_pixels=1))
    loop, _ = new_loop(load_tiny("qwen3_vl")[0], start)
    for stage in stages(with_video=True):
        warm_up(loop, stage)
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "can't answer a prompt with a video" in record.getMessage()
    assert "1 pixels" in record.getMessage()


def test_a_video_that_ends_the_loop_refuses_nobody(
    load_tiny: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
):
    loop, _ = new_loop(load_tiny("qwen3_vl")[0])
    video = next(stage for stage in stages(with_video=True) if not stage.is_needed)

    def breaks() -> None:
        raise EngineBroken("1 steps in a row failed")

    monkeypatch.setattr(loop, "run_until_idle", breaks)
    warm_up(loop, video)
    with pytest.raises(EngineBroken):
        warm_up(loop, stages(with_video=True)[0])


def test_what_is_needed_and_fails_refuses_the_model(load_tiny: Callable[[str], Served]):
    loop, _ = new_loop(load_tiny("qwen3_vl")[0])
    broken = image_of(b"\x89PNG\r\n\x1a\n nothing", "PNG", 8, 8)
    with pytest.raises(ModelLoadError, match="can't answer a picture: "):
        warm_up(loop, Stage("a picture", (ask("a picture", broken),)))


def test_a_family_without_videos_is_shown_none():
    assert "a video" not in [stage.name for stage in stages(with_video=False)]
