"""Images encoded by tiles equal images encoded whole, bit for bit, with any tiles cached."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from PIL import Image as PillowImage

from tests.integration.harness import (
    GREEDY,
    EngineHarness,
    Served,
    Turns,
    ask,
    caches_of,
    conversation,
    encode_works,
)
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.support.screenshots import screenshots
from vlm_server.cache.lru import LruCache
from vlm_server.cache.prompt_key import inputs_hash
from vlm_server.errors import InternalError
from vlm_server.interfaces import EncodeWork, MemoryReading
from vlm_server.protocol import Finished
from vlm_server.runner.caches import build_caches
from vlm_server.runner.device.device import DeviceKind
from vlm_server.runner.encode.encoder import ImageEncoder, ImageFeatures
from vlm_server.runner.encode.tile_encoder import TileCache
from vlm_server.runner.families.table import FAMILIES
from vlm_server.settings import CacheSettings

pytestmark = pytest.mark.families("tiling")

TILED = sorted({row.name for row in FAMILIES.values() if row.tiling is not None and not row.embeds})
LOTS = 1 << 20
SIZES = ((200, 140), (500, 170), (170, 500), (300, 300))
"""Most become several tiles with every tiny checkpoint, in several shapes; some need padding."""


@pytest.fixture(params=TILED, scope="module")
def served(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


@pytest.fixture
def smol(load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny("smolvlm")


def work_of(served: Served, shown: PillowImage.Image, salt: str = "") -> EncodeWork:
    submit = msgspec.structs.replace(ask("a", shown, "what?"), cache_salt=salt)
    (work,) = encode_works(served[1], submit)
    return work


def keys_of(served: Served, work: EncodeWork) -> list[str]:
    tiling = served[0].tiling
    assert tiling is not None
    return [inputs_hash(tile, work.prompt.cache_salt) for tile in tiling.split(work.inputs)]


def new_cache(limit_bytes: int = LOTS) -> TileCache:
    return LruCache("tile", limit_bytes)


def assert_equal(made: Any, wanted: ImageFeatures) -> None:
    """Bit for bit."""
    for one, other in zip(made.arrays, wanted.arrays, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.array_equal(np.array(one), np.array(other))


def with_spot(shown: PillowImage.Image) -> PillowImage.Image:
    """The same image, but for the lower right corner."""
    changed = shown.copy()
    changed.paste((255, 0, 0), (shown.width - 12, shown.height - 12, shown.width, shown.height))
    return changed


# ---- exactness ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_tiled_encode_features_equal_whole_encode(served: Served, size: tuple[int, int]):
    work, cache = work_of(served, random_image(1, *size)), new_cache()
    encoder, wanted = ImageEncoder(served[0], cache), ImageEncoder(served[0]).encode([work])[0]
    assert_equal(encoder.encode([work])[0], wanted)
    assert_equal(encoder.encode([work])[0], wanted)
    keys = keys_of(served, work)
    if len(keys) == 1:
        assert cache.stats().entries == 0, "it is in the encoder cache as a whole"
    else:
        assert cache.stats().entries == cache.stats().misses == len(set(keys))
        assert cache.stats().hits == len(set(keys))
    check_integrity(cache)
    assert cache.num_references == 0


def test_encode_reports_tokens_per_call(served: Served):
    """The memory estimate of an encode is learned from this number."""
    work, alone = work_of(served, random_image(1, 500, 170)), ImageEncoder(served[0], new_cache())
    num_tokens, num_tiles = work.num_tokens, len(keys_of(served, work))
    at_once = alone.encode([work])[0].tokens_per_call
    assert at_once is not None
    assert num_tokens / (2 * num_tiles) < at_once < num_tokens
    assert alone.encode([work])[0].tokens_per_call == 0, "all are known"
    assert ImageEncoder(served[0]).encode([work])[0].tokens_per_call is None


def test_image_sizes_give_several_tiles_in_each_family(served: Served):
    works = [work_of(served, random_image(1, *size)) for size in SIZES]
    assert sum(len(keys_of(served, work)) > 2 for work in works) >= 2


def test_changed_tiles_alone_are_encoded(served: Served):
    shown, cache = random_image(2, 500, 170), new_cache()
    before, after = work_of(served, shown), work_of(served, with_spot(shown))
    encoder = ImageEncoder(served[0], cache)
    encoder.encode([before])[0]
    known, keys = set(keys_of(served, before)), set(keys_of(served, after))
    assert 0 < len(keys - known) < len(keys)
    misses = cache.stats().misses
    assert_equal(encoder.encode([after])[0], ImageEncoder(served[0]).encode([after])[0])
    assert cache.stats().misses - misses == len(keys - known)
    assert cache.stats().entries == len(keys | known)


def test_equal_tiles_are_encoded_once(served: Served):
    work, cache = work_of(served, PillowImage.new("RGB", (500, 170), (30, 60, 90))), new_cache()
    keys = keys_of(served, work)
    assert_equal(
        ImageEncoder(served[0], cache).encode([work])[0], ImageEncoder(served[0]).encode([work])[0]
    )
    assert cache.stats().entries == cache.stats().misses == len(set(keys))
    assert len(set(keys)) < len(keys)


def test_screenshot_conversation_answers_as_without_tile_cache(served: Served):
    """Whole requests, with every cache and the tile cache, against none."""
    plain = EngineHarness(*served)
    engine = EngineHarness(*served, caches=caches_of(served, tile_bytes=LOTS))
    shown, turns = random_image(3, 500, 170), cast(Turns, ())
    for number in range(3):
        turns += (("user", (f"Step {number}", shown, "what changed?")),)
        submit = conversation(f"turn {number}", *turns, sampling=GREEDY)
        assert engine.answer(submit) == plain.answer(submit), number
        turns += (("assistant", (engine.texts[submit.request_id],)),)
        shown = with_spot(shown) if number == 0 else random_image(4, 500, 170)
    reading = engine.caches.tiles.stats()
    assert reading.hits > 0
    assert reading.pinned_bytes == 0
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0


# ---- keys --------------------------------------------------------------------------------


def test_tiles_of_different_salts_are_not_shared(served: Served):
    shown, cache = random_image(5, 500, 170), new_cache()
    encoder = ImageEncoder(served[0], cache)
    mine, theirs = work_of(served, shown, "mine"), work_of(served, shown, "theirs")
    assert not set(keys_of(served, mine)) & set(keys_of(served, theirs))
    encoder.encode([mine])[0]
    assert_equal(encoder.encode([theirs])[0], ImageEncoder(served[0]).encode([theirs])[0])
    assert cache.stats().hits == 0


def test_tile_key_depends_on_pixels_shapes_types_and_salt():
    zeros = np.zeros((1, 3, 4, 4), np.float32)
    tiles = [
        {"pixel_values": zeros},
        {"pixel_values": zeros + 1},
        {"pixel_values": zeros.reshape(1, 3, 2, 8)},
        {"pixel_values": zeros.astype(np.int32)},
        {"pixel_values": zeros, "spatial_shapes": np.array([[2, 2]])},
        {"pixel_values": zeros, "spatial_shapes": np.array([[4, 1]])},
    ]
    assert len({inputs_hash(tile, salt) for tile in tiles for salt in ("", "a")}) == 2 * len(tiles)


# ---- memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_tile_cache_too_small_changes_no_features(smol: Served, part: float):
    first, second = (work_of(smol, random_image(seed, 200, 140)) for seed in (6, 7))
    whole = new_cache()
    ImageEncoder(smol[0], whole).encode([first])[0]
    cache = new_cache(int(part * whole.stats().size_bytes))
    encoder = ImageEncoder(smol[0], cache)
    for work in (first, second, first):
        assert_equal(encoder.encode([work])[0], ImageEncoder(smol[0]).encode([work])[0])
        check_integrity(cache)
        assert cache.num_references == 0
    assert (cache.stats().evictions > 0) == (part > 0)


def test_cached_tiles_of_image_survive_its_new_tiles(smol: Served):
    """Though the tiles that are looked up last were used longest ago."""
    shown = random_image(8, 200, 140)
    before, cache = work_of(smol, shown), new_cache()
    shown.paste((255, 0, 0), (0, 0, shown.width, 12))
    after, encoder = work_of(smol, shown), ImageEncoder(smol[0], cache)
    encoder.encode([before])[0]
    cache.resize(cache.stats().size_bytes)
    for key in reversed(keys_of(smol, before)):
        cache.get(key)
    num_new = len(set(keys_of(smol, after)) - set(keys_of(smol, before)))
    assert num_new == 3, "the upper two, and the small copy"
    misses = cache.stats().misses
    encoder.encode([after])[0]
    assert cache.stats().misses - misses == num_new


def test_non_finite_tile_features_are_not_stored(served: Served):
    work, cache = work_of(served, random_image(9, 500, 170)), new_cache()
    pixels = work.inputs["pixel_values"].copy()
    pixels.reshape(-1)[-1] = np.nan  # the last tile's, or the small copy's
    work = replace(work, inputs={**work.inputs, "pixel_values": pixels})
    if served[0].family.name == "lfm2_vl":
        pixels[-1] = np.nan  # its end is padding
    encoder = ImageEncoder(served[0], cache)
    for _ in range(2):
        with pytest.raises(InternalError, match="not finite"):
            encoder.encode([work])[0]
    broken = keys_of(served, work)[-1]
    assert broken not in cache
    assert cache.num_references == 0


def test_cleared_tiles_return_their_memory(smol: Served):
    engine = EngineHarness(*smol, caches=caches_of(smol, tile_bytes=LOTS))

    def show(seed: int) -> None:
        engine.answer(ask(f"{seed}", random_image(seed, 200, 140), "what?"))
        assert isinstance(engine.ends[f"{seed}"], Finished)

    show(0)
    engine.caches.clear()
    baseline = active_bytes()
    for seed in range(1, 13):
        show(seed)
    stored = engine.caches.tiles.stats().size_bytes
    assert active_bytes() - baseline >= stored > 0
    assert engine.caches.evictable_bytes >= stored
    engine.caches.clear()
    assert engine.caches.tiles.stats().size_bytes == 0
    assert active_bytes() - baseline < stored / 4


@pytest.mark.parametrize("encoder_bytes", [1000, 0])
def test_tiles_are_part_of_encoder_caches_bytes(
    load_tiny: Callable[[str], Served], encoder_bytes: int
):
    settings = CacheSettings(max_encoder_bytes=encoder_bytes)
    for name, tile_bytes in (("smolvlm", encoder_bytes // 4), ("qwen3_vl", 0)):
        caches = build_caches(settings, MemoryReading(0, 0, 1 << 30), load_tiny(name)[0])
        limits = {each.name: each.limit_bytes for each in caches.stats()}
        assert limits["tile"] == tile_bytes
        assert limits["tile"] + limits["encoder"] == encoder_bytes


def test_cuda_encodes_image_in_one_call(smol: Served):
    loaded = smol[0]
    cuda = replace(loaded, device=replace(loaded.device, kind=DeviceKind.CUDA))
    metal = replace(loaded, device=replace(loaded.device, kind=DeviceKind.METAL))
    assert loaded.tiling is metal.tiling is loaded.family.tiling is not None
    assert cuda.tiling is None
    cache = new_cache()
    ImageEncoder(cuda, cache).encode([work_of(smol, random_image(1, 200, 140))])[0]
    assert cache.stats().entries == cache.stats().misses == 0


# ---- which families ----------------------------------------------------------------------


def test_documented_tiled_families_match_table():
    page = (Path(__file__).parents[2] / "docs" / "caches.md").read_text()
    section = page.partition("## Tiles")[2].partition("\n## ")[0]
    assert {name for name in re.findall(r"`(\w+)`", section) if name in FAMILIES} == set(TILED)


# ---- inputs of other kinds ---------------------------------------------------------------


def test_unknown_encoder_inputs_are_not_tiled(smol: Served):
    work, tiling = work_of(smol, random_image(1, 200, 140)), smol[0].tiling
    assert tiling is not None
    assert len(tiling.split(work.inputs)) > 1
    assert tiling.split({**work.inputs, "depth_values": np.zeros(3)}) == []
    assert tiling.split({"pixel_values_videos": work.inputs["pixel_values"]}) == []


# ---- what it saves -----------------------------------------------------------------------


def test_successive_screenshots_share_most_tiles(load_tiny: Callable[[str], Served]):
    served = load_tiny("lfm2_vl")
    shown = [set(keys_of(served, work_of(served, each))) for each in screenshots(1, 4)]
    new = [len(after - before) for before, after in pairwise(shown)]
    assert max(new) < len(shown[0]) * 0.8
