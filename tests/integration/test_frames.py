"""A prompt that is read in frames of few sizes gets the answer that it gets without."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_vlm.models.cache import KVCache, make_prompt_cache

from tests.integration.harness import Engine, Part, ask
from tests.integration.test_caches import caches_of
from tests.tiny_models import build
from tests.tiny_models.pictures import picture
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import SamplingParams
from vlm_server.runner.model.load import LoadedModel, load
from vlm_server.runner.text import prefill
from vlm_server.runner.text.padded_chunk import PaddedChunk, PaddedChunkCache
from vlm_server.settings import Model

Served = tuple[LoadedModel, MultimodalPreparer]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS: tuple[tuple[Part, ...], ...] = (
    ("Hi",),
    ("Look at the second button" + ", and read the number" * 6,),
    (picture(1), "Describe this image."),
    (picture(1), "Describe this picture, please."),
    ("First", picture(2, 100, 60), "and then", picture(3), "which one?"),
)


def answers(engine: Engine) -> list[list[int]]:
    """Those of all prompts, two at once."""
    requests = [ask(f"{i}", *parts, sampling=GREEDY) for i, parts in enumerate(PROMPTS)]
    for first, second in zip(requests[::2], [*requests[1::2], None], strict=True):
        engine.add(first)
        engine.step(2)
        if second:
            engine.add(second)
        engine.run()
    return [engine.tokens[request.request_id] for request in requests]


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[PaddedChunk]:
    """Those that are read from now on, which are multiples of 16 tokens."""
    read = list[PaddedChunk]()

    class Watched(PaddedChunkCache):
        def __init__(self, cache: KVCache, frame: PaddedChunk) -> None:
            read.append(frame)
            super().__init__(cache, frame)

    monkeypatch.setattr(prefill, "PaddedChunkCache", Watched)
    monkeypatch.setattr(prefill, "padding_multiple", lambda: 16)
    return read


@pytest.mark.parametrize("chunk_tokens", [512, 21])
@pytest.mark.parametrize("is_cached", [False, True])
def test_answers_are_the_same(
    served: Served, request: pytest.FixtureRequest, chunk_tokens: int, is_cached: bool
):
    def engine() -> Engine:
        caches = {"caches": caches_of(served)} if is_cached else {}
        return Engine(*served, chunk_tokens=chunk_tokens, **caches)

    alone = answers(engine())
    frames: list[PaddedChunk] = request.getfixturevalue("frames")
    assert answers(engine()) == alone
    layers = make_prompt_cache(served[0].language_model)
    if any(type(layer) is not KVCache for layer in layers):
        assert not frames, "what comes behind a token would change what such layers hold"
        return
    assert {frame.first % 16 for frame in frames} == {frame.last % 16 for frame in frames} == {0}
    assert any(frame.num_behind for frame in frames)
    if is_cached or chunk_tokens < 30:
        assert any(frame.first < frame.start for frame in frames)


def test_tokens_that_see_later_ones_are_read_without_frames(
    frames: list[PaddedChunk], tmp_path: Path
):
    loaded = load(Model(path=str(build("qwen3_vl", tmp_path))))
    loaded.model.no_chunked_prefill = True  # as families say it whose tokens see all others
    engine = Engine(loaded, MultimodalPreparer(loaded))
    answers(engine)
    assert all(prompt.is_atomic for prompt in engine.prompts.values())
    assert not frames


def test_a_frame_is_the_least_around_its_tokens():
    assert PaddedChunk.around(70, 130, 64) == PaddedChunk(70, 130, 64, 192)
    assert PaddedChunk.around(64, 128, 64).is_exact
    assert PaddedChunk.around(0, 1, 64).is_exact, "one token has a kernel of its own"
    assert PaddedChunk.around(70, 130, 1).is_exact
