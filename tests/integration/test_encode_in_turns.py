"""An image that is encoded in parts, between decode steps, is as one that is encoded at once."""

from __future__ import annotations

import math

import pytest

from tests.integration.harness import EngineHarness, Load, Served, ask, encode_works
from tests.integration.prompts import LONGER, prompt_request
from tests.integration.test_compiled_model import run_all
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.cache.lru import LruCache
from vlm_server.engine.encoding import EncoderInTurns
from vlm_server.interfaces import Encoder, EncodeWork
from vlm_server.protocol import Finished
from vlm_server.runner.backends.cpu import CpuBackend
from vlm_server.runner.encode import encoder
from vlm_server.runner.encode.encoder import ImageEncoder, ImageEncoding, PartTimes

pytestmark = pytest.mark.families("tower", "tiling")


WITHOUT_TOWER = ("gemma4_unified",)
"""Families whose encode has one part."""


@pytest.fixture(autouse=True)
def encodes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encodes in parts, as on a device that encodes in turns and takes long for each layer."""
    monkeypatch.setattr(CpuBackend, "encodes_in_turns", True)
    monkeypatch.setattr(encoder, "_TURN_SECONDS", 0.0)


class PartCountingEncoder:
    """An encoder that notes in how many parts each call was launched."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.num_parts: list[int] = []

    def begin(self, works: list[EncodeWork]) -> ImageEncoding:
        encoding, number = self._encoder.begin(works), len(self.num_parts)
        self.num_parts.append(0)
        assert isinstance(encoding, ImageEncoding)
        advance = encoding.advance

        def counted() -> bool:
            self.num_parts[number] += 1
            return advance()

        encoding.advance = counted  # type: ignore[method-assign]
        return encoding


def engine_in_turns(served: Served) -> tuple[EngineHarness, PartCountingEncoder]:
    engine = EngineHarness(*served)
    counting = PartCountingEncoder(ImageEncoder(served[0], engine.caches.tiles))
    engine.loop.encoder = EncoderInTurns(counting, engine.inbox)  # type: ignore[arg-type]
    return engine, counting


@pytest.mark.parametrize("stagger", few_of([0, 4], [4]))
def test_encode_in_turns_answers_equal_single_encode(
    served: Served, answered: EngineHarness, stagger: int
):
    engine, counting = engine_in_turns(served)
    assert run_all(engine, LONGER, stagger) == answered.tokens
    assert counting.num_parts
    if served[0].family.name not in WITHOUT_TOWER:
        assert all(number > 1 for number in counting.num_parts)
    assert engine.num_tracked == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_sequences_decode_between_encode_parts(load_tiny: Load, family: str):
    engine, counting = engine_in_turns(load_tiny(family))
    engine.add(prompt_request("long", LONGER))
    engine.step_until(lambda: len(engine.tokens.get("long", ())) >= 2)
    engine.add(ask("image", random_image(1, 200, 140), "what?"))
    engine.step_until(lambda: bool(counting.num_parts))
    before = len(engine.tokens["long"])
    engine.step_until(lambda: not engine.loop.encoder.has_parts_left)
    assert len(engine.tokens["long"]) - before >= counting.num_parts[0] > 1
    engine.run()
    assert isinstance(engine.ends["image"], Finished)


def test_encode_in_turns_has_one_part_per_tower_layer(load_tiny: Load):
    loaded, preparer = load_tiny("qwen2_5_vl")
    (work,) = encode_works(preparer, ask("a", random_image(1, 600, 600), "what?"))
    encoding, number = ImageEncoder(loaded).begin([work]), 1
    while encoding.advance():
        number += 1
    assert number == len(loaded.model.vision_tower.blocks), "the first turn has two parts"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_fast_encode_is_single_part(load_tiny: Load, monkeypatch: pytest.MonkeyPatch, family: str):
    monkeypatch.setattr(encoder, "_TURN_SECONDS", math.inf)
    loaded, preparer = load_tiny(family)
    (work,) = encode_works(preparer, ask("a", random_image(1, 200, 140), "what?"))
    assert not ImageEncoder(loaded, LruCache("tile", 0)).begin([work]).advance()


def test_part_of_known_size_is_measured_rarely():
    times = PartTimes()
    assert times.expected_seconds(100) is None
    times.record(100, 3.0)
    assert times.expected_seconds(100) is None, "the first may have compiled kernels"
    times.record(100, 0.001)
    for _ in range(encoder._ENCODES_PER_MEASURE):
        assert times.expected_seconds(100) == 0.001
    assert times.expected_seconds(100) is None, "the device may be slower by now"
    times.record(100, 0.002)
    assert times.expected_seconds(100) == 0.001
    assert times.expected_seconds(200) is None


def test_part_times_stay_bounded():
    times = PartTimes()
    for size in range(3 * encoder._MAX_SIZES):
        times.record(size, 1.0)
    assert len(times._sizes) <= encoder._MAX_SIZES
