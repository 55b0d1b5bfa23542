"""Image sizes as requested, as reported, and as cached."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image as PillowImage

from tests.integration.harness import EngineHarness, Load, ask, new_preparer, prepare, prompt_of
from tests.support.image_files import submitted
from tests.support.images import random_image
from tests.support.whole_run import few_of
from tests.tiny_models import FAMILIES
from vlm_server import settings
from vlm_server.cache.caches import Caches
from vlm_server.errors import InvalidImage, InvalidRequest, InvalidVideo
from vlm_server.interfaces.model_spec import ProcessedMedia
from vlm_server.prompt.media.decoders import Clip, Decoders
from vlm_server.prompt.media.processing import process_image, process_video
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Finished, Image, ImageUse, Submit
from vlm_server.runner.loaded import LoadedModel

pytestmark = pytest.mark.families("tiling")

SHOT = submitted(random_image(1, 320, 200))
CACHING = {"encoder_bytes": 1 << 24, "pixel_bytes": 1 << 24, "prefix_bytes": 1 << 24}


def screenshot(**wishes: object) -> Image:
    return replace(SHOT, **wishes)


def image_uses(preparer: MultimodalPreparer, *images: Image) -> tuple[ImageUse, ...]:
    return prompt_of(preparer, ask("a", *images, "what?")).images


@pytest.mark.parametrize(
    ("wishes", "size"),
    [
        ({}, (308, 196)),
        ({"min_pixels": 400 * 300}, (448, 280)),
        ({"max_pixels": 100 * 100}, (112, 56)),
        ({"min_pixels": 1, "max_pixels": 1 << 40}, (308, 196)),
        ({"for_grounding": True}, (1148, 728)),
        ({"for_grounding": True, "max_pixels": 400 * 300}, (420, 252)),
        ({"max_side_pixels": 100}, (112, 56)),
        ({"min_pixels": 1 << 40}, (1260, 784)),
    ],
    ids=str,
)
def test_qwen_image_size_follows_request_within_checkpoint_bounds(
    load_tiny: Load, wishes: dict[str, object], size: tuple[int, int]
):
    (use,) = image_uses(load_tiny("qwen2_5_vl")[1], screenshot(**wishes))
    assert (use.width, use.height) == size
    assert use.tokens == use.width * use.height // 28**2


def test_scaled_image_equals_processors_own_scaling(load_tiny: Load):
    loaded, preparer = load_tiny("qwen2_5_vl")
    wanted = screenshot(min_pixels=400 * 300)
    (ours,) = prepare(preparer, ask("a", wanted, "what?")).inputs.values()
    own = loaded.processor.image_processor(random_image(1, 320, 200), min_pixels=400 * 300)
    assert ours["image_grid_thw"].reshape(-1).tolist() == list(own["image_grid_thw"][0])
    assert np.array_equal(ours["pixel_bytes"], own["pixel_bytes"])


def with_settings(loaded: LoadedModel, **changes: int) -> MultimodalPreparer:
    return new_preparer(
        loaded, Decoders(settings.ImageSettings(**changes), settings.VideoSettings(), 1)
    )


def test_image_settings_bound_requested_image_sizes(load_tiny: Load):
    loaded = load_tiny("qwen2_5_vl")[0]
    limited = with_settings(loaded, max_pixels=200 * 200)
    (as_set, asked) = image_uses(limited, screenshot(), screenshot(min_pixels=1 << 30))
    assert as_set.width * as_set.height <= 200 * 200
    assert asked.width * asked.height <= 210 * 210
    large = with_settings(loaded, min_tokens=256)
    (least, low) = image_uses(large, screenshot(), screenshot(max_side_pixels=100))
    assert least.tokens >= 256
    assert low.tokens < 20, "who asks for low detail gets it"


@pytest.mark.parametrize("family", FAMILIES)
def test_families_report_image_sizes_and_obey_max_pixels(load_tiny: Load, family: str):
    preparer = load_tiny(family)[1]
    whole, small = image_uses(preparer, screenshot(), screenshot(max_pixels=50 * 50))
    prompt = prompt_of(preparer, ask("a", screenshot(), "what?"))
    assert prompt.images == (whole,)
    assert whole.tokens == prompt.spans[0].end - prompt.spans[0].start
    assert whole.width > 0 < whole.height
    assert small.tokens <= whole.tokens


@pytest.mark.parametrize("family", ["gemma3", "pixtral"])
def test_min_pixels_are_refused_in_families_without_pixel_rule(load_tiny: Load, family: str):
    with pytest.raises(InvalidRequest) as refused:
        image_uses(load_tiny(family)[1], screenshot(min_pixels=1000))
    assert refused.value.param == "mm_processor_kwargs.min_pixels"


def test_video_frames_are_not_reported_as_images(load_tiny: Load):
    from tests.integration.test_videos import SMALL

    assert prompt_of(load_tiny("gemma3")[1], ask("a", SMALL, "what?")).images == ()


# ---- caches --------------------------------------------------------------------------

WISHES: list[dict[str, object]] = [
    {},
    {"min_pixels": 300 * 300},
    {"max_pixels": 150 * 150},
    {"min_pixels": 300 * 300},
    {"max_pixels": 150 * 150, "max_side_pixels": 250},
    {"for_grounding": True},
    {},
]


@pytest.mark.parametrize("family", few_of(["qwen2_5_vl", "qwen3_vl", "pixtral"], ["qwen2_5_vl"]))
def test_cached_images_of_different_sizes_answer_as_uncached(load_tiny: Load, family: str):
    """A hit equals a miss: one engine with caches answers as engines without do."""
    loaded, preparer = load_tiny(family)
    wishes = [w for w in WISHES if loaded.spec.pixel_rule or "min_pixels" not in w]
    cached = EngineHarness(loaded, preparer, caches=Caches(**CACHING))
    for number, wish in enumerate(wishes):
        submit = ask(f"{number}", screenshot(**wish), "what?")
        fresh = EngineHarness(loaded, preparer)
        assert cached.answer(submit) == fresh.answer(submit), wish
        assert images_of(cached, submit) == images_of(fresh, submit), wish


def images_of(engine: EngineHarness, submit: Submit) -> tuple[ImageUse, ...]:
    end = engine.ends[submit.request_id]
    assert isinstance(end, Finished)
    assert end.images
    return end.images


def test_size_requests_without_effect_share_cache(load_tiny: Load):
    loaded, preparer = load_tiny("qwen2_5_vl")
    engine = EngineHarness(loaded, preparer, caches=Caches(**CACHING))
    engine.answer(ask("a", screenshot(), "what?"))
    again = ask("b", screenshot(min_pixels=1, max_pixels=1 << 30), "what?")
    engine.answer(again)
    end = engine.ends["b"]
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == end.usage.prompt_tokens - 1


# ---- counting ------------------------------------------------------------------------


def test_token_count_reports_prompt_and_cached_tokens(load_tiny: Load):
    loaded, preparer = load_tiny("qwen2_5_vl")
    engine = EngineHarness(loaded, preparer, caches=Caches(**CACHING))
    asked = ask("a", screenshot(), "what?")
    cold = count_tokens(engine, asked, "cold")
    engine.answer(asked)
    answered = engine.ends["a"]
    assert isinstance(answered, Finished)
    warm = count_tokens(engine, asked, "warm")
    assert cold.usage.prompt_tokens == warm.usage.prompt_tokens == answered.usage.prompt_tokens
    assert (cold.usage.cached_tokens, cold.usage.completion_tokens) == (0, 0)
    assert warm.usage.cached_tokens == warm.usage.prompt_tokens - 1
    assert cold.images == warm.images == answered.images
    assert list(cold.token_ids) == engine.prompts["a"].token_ids.tolist()


def count_tokens(engine: EngineHarness, submit: Submit, name: str) -> Finished:
    return engine.finish(replace(submit, request_id=name, count_only=True))


def test_raw_prompt_is_answered_and_read_back(load_tiny: Load):
    loaded, preparer = load_tiny("qwen2_5_vl")
    engine = EngineHarness(loaded, preparer)
    raw = replace(ask("a"), messages=(), prompt="a red circle")
    as_ids = count_tokens(engine, raw, "ids").token_ids
    back = count_tokens(engine, replace(raw, prompt=as_ids), "back")
    assert (back.text, back.token_ids) == ("a red circle", as_ids)
    text = engine.answer(raw)
    assert text
    assert engine.answer(replace(raw, request_id="b", prompt=as_ids)) == text


@pytest.mark.parametrize("prompt", ["", (10**6,), (0, -1)])
def test_invalid_raw_prompt_is_refused(load_tiny: Load, prompt: str | tuple[int, ...]):
    with pytest.raises(InvalidRequest):
        prompt_of(load_tiny("qwen2_5_vl")[1], replace(ask("a"), messages=(), prompt=prompt))


def test_raw_prompt_has_no_images(load_tiny: Load):
    loaded, preparer = load_tiny("qwen2_5_vl")
    raw = replace(ask("a"), messages=(), prompt=(5, loaded.spec.image_token_id))
    with pytest.raises(InvalidRequest, match="stand for images"):
        prompt_of(preparer, raw)


@pytest.mark.parametrize("size", [(1000, 4), (4, 1000)], ids=["wide", "tall"])
def test_image_size_refusal_gives_reason(load_tiny: Load, size: tuple[int, int]):
    with pytest.raises(InvalidImage, match=r"x.* pixels: .*aspect ratio must be smaller than 200"):
        image_uses(load_tiny("qwen2_5_vl")[1], submitted(PillowImage.new("RGB", size)))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("height:8 or width:9\n must be larger than 32"), ": height:8 or width:9 must"),
        (RuntimeError("/home/me/model: no such file"), ""),
        (ValueError(), ""),
    ],
)
def test_processor_error_details_in_refusals_are_limited(
    load_tiny: Load, error: Exception, told: str
):
    def fail(*_: object) -> ProcessedMedia:
        raise error

    host = dataclasses.replace(
        load_tiny("qwen2_5_vl")[0].spec, process_image=fail, process_video=fail
    )
    frames = np.zeros((2, 8, 9, 3), np.uint8)
    with pytest.raises(InvalidImage) as image_refusal:
        process_image(host, "", frames[0], "part")
    with pytest.raises(InvalidVideo) as clip_refusal:
        process_video(host, 1, "", Clip(frames, (0.0, 1.0)), "part", "")
    for refusal in (image_refusal.value, clip_refusal.value):
        assert refusal.message.partition("9x8 pixels")[2][: len(told) or None] == told
        assert len(refusal.message) < 300
        assert "/home" not in refusal.message
