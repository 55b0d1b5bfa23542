"""Videos beside everything else: in a batch, in chunks, with images, and as mlx-vlm sees them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_vlm import stream_generate
from mlx_vlm.prompt_utils import get_chat_template
from mlx_vlm.utils import VideoMetadata, prepare_inputs
from msgspec import structs
from PIL import Image as PillowImage

from tests.integration.harness import (
    DECODERS,
    EngineHarness,
    NewEngine,
    Part,
    Served,
    ask,
    load_model,
    new_preparer,
    prompt_of,
    video_of,
)
from tests.support import video_files
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from tests.tiny_models.fixtures import TinyModel
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.media.decoders import Clip
from vlm_server.protocol import Failed, SamplingParams, Video
from vlm_server.runner.families.table import FAMILIES
from vlm_server.runner.loaded import LoadedModel
from vlm_server.settings import VideoSettings

pytestmark = pytest.mark.families("media", "rope")

NATIVE = tuple(
    sorted(name for name, row in FAMILIES.items() if row.takes_videos and not row.embeds)
)
BY_FRAMES = ("gemma3", "smolvlm")

SEVEN = video_of(video_files.encode(video_files.noise(1, 7), fps=2))
SMALL = video_of(video_files.encode(video_files.noise(2, 12, (64, 96)), "webm", fps=4), "WEBM")
PROMPTS: dict[str, tuple[Part, ...]] = {
    "text": ("Which colour is the shape on the left?",),
    "video": (SEVEN, "Describe this image."),
    "both": ("A picture", random_image(1), "and a video", SMALL, "which one?"),
    "video first": (SMALL, random_image(2, 100, 60), "which?", SEVEN),
}
LONGER = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture(params=NATIVE + BY_FRAMES, scope="module")
def served(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


@pytest.fixture(params=NATIVE, scope="module")
def native(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


@pytest.fixture(params=BY_FRAMES, scope="module")
def by_frames(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


@pytest.fixture(scope="module")
def tokens_alone(served: Served) -> Callable[[str], list[int]]:
    """The 20 tokens of a prompt that runs alone and is prefilled whole."""
    return cache(
        lambda name: EngineHarness(*served, chunk_tokens=8192).answer(prompt_request(name))
    )


def prompt_request(name: str, sampling: SamplingParams = LONGER) -> Any:
    return ask(name, *PROMPTS[name], sampling=sampling)


def decode_clip(video: Video, **limits: Any) -> Clip:
    return DECODERS.video(video, VideoSettings(**limits), Cancellation())


# ---- videos beside other requests ----------------------------------------------------


def test_batched_and_chunked_video_answers_equal_answers_alone(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]]
):
    engine = new_engine(chunk_tokens=23)
    for name in PROMPTS:
        engine.add(prompt_request(name))
    engine.run()
    assert engine.tokens == {name: tokens_alone(name) for name in PROMPTS}


def test_joining_video_request_changes_no_running_answer(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]]
):
    engine = new_engine(chunk_tokens=16)
    engine.add(prompt_request("text"))
    engine.add(prompt_request("both"))
    engine.step_until(lambda: len(engine.tokens.get("both", [])) >= 6)
    engine.add(prompt_request("video"))
    engine.run()
    assert engine.tokens == {name: tokens_alone(name) for name in ("text", "both", "video")}


@pytest.mark.families("media")
def test_different_videos_get_different_answers(new_engine: NewEngine):
    engine = new_engine()
    first = engine.answer(ask("a", SEVEN, "what?"))
    assert (
        engine.answer(
            ask("b", video_of(video_files.encode(video_files.noise(3, 7), fps=2)), "what?")
        )
        != first
    )
    assert engine.answer(ask("c", SEVEN, "what?")) == first


@pytest.mark.families("media")
def test_answer_depends_on_order_of_frames(new_engine: NewEngine):
    engine = new_engine()
    backwards = video_of(video_files.encode(video_files.noise(1, 7)[::-1], fps=2))
    assert engine.answer(ask("a", SEVEN, "what?")) != engine.answer(ask("b", backwards, "what?"))


@pytest.mark.families("media")
def test_truncated_video_fails_only_its_request(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]]
):
    engine = new_engine()
    engine.add(prompt_request("video"))
    failed = engine.failure(ask("broken", video_of(SEVEN.data[:600]), "what?"))
    assert (failed.code, failed.param) == ("invalid_video", "messages[0]")
    assert engine.tokens["video"] == tokens_alone("video")


@pytest.mark.whole
def test_device_memory_returns_to_baseline_after_video_bursts(new_engine: NewEngine):
    engine = new_engine(chunk_tokens=64)

    def run_burst(number: int) -> None:
        for name, parts in PROMPTS.items():
            engine.add(ask(f"{name} {number}", *parts))
        engine.step(4)
        engine.abort(f"both {number}")
        engine.run()

    run_burst(0)
    baseline = active_bytes()
    for number in range(1, 3):
        run_burst(number)
    assert active_bytes() <= baseline * 1.01


# ---- families that take videos whole --------------------------------------------------


def mlx_vlms_inputs(loaded: LoadedModel, *parts: Part) -> dict[str, Any]:
    """The processor's own work on the whole prompt."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "video" if isinstance(part, Video) else "image"}
        for part in parts
    ]
    text = get_chat_template(
        loaded.processor, [{"role": "user", "content": content}], add_generation_prompt=True
    )
    found = [decode_clip(part) for part in parts if isinstance(part, Video)]
    stamps = [[round(seconds * 1000) for seconds in each.seconds] for each in found]
    return prepare_inputs(
        loaded.processor,
        images=[part for part in parts if isinstance(part, PillowImage.Image)] or None,
        videos=[each.frames for each in found],
        video_metadata=[VideoMetadata(each[-1] + 1, 1000.0, each) for each in stamps],
        prompts=text,
        image_token_index=loaded.spec.image_token_id,
    )


@pytest.mark.parametrize("name", ["video", "both", "video first"])
def test_video_token_ids_equal_processors(native: Served, name: str):
    loaded, preparer = native
    inputs = mlx_vlms_inputs(loaded, *PROMPTS[name])
    prepared = prompt_of(preparer, prompt_request(name))
    assert prepared.token_ids.tolist() == np.array(inputs["input_ids"]).reshape(-1).tolist()


def mlx_vlm_tokens(loaded: LoadedModel, name: str) -> list[int]:
    """mlx-vlm's own greedy tokens."""
    inputs = mlx_vlms_inputs(loaded, *PROMPTS[name])
    results = stream_generate(
        loaded.model,
        loaded.processor,
        "",
        input_ids=inputs.pop("input_ids"),
        pixel_values=inputs.pop("pixel_values", None),
        mask=inputs.pop("attention_mask"),
        max_tokens=20,
        temperature=0.0,
        **inputs,
    )
    return [int(result.token) for result in results][:20]


def test_greedy_tokens_of_video_equal_mlx_vlms(
    native: Served, load_mlx_vlms: Callable[[str], LoadedModel]
):
    wanted = mlx_vlm_tokens(load_mlx_vlms(native[0].family.name), "video")
    assert EngineHarness(*native).answer(prompt_request("video")) == wanted


def test_greedy_tokens_of_image_and_video_equal_mlx_vlms(
    load_tiny: Callable[[str], Served], load_mlx_vlms: Callable[[str], LoadedModel]
):
    """Of this family alone: of the others, mlx-vlm takes one or the other."""
    wanted = mlx_vlm_tokens(load_mlx_vlms("qwen3_vl"), "both")
    assert EngineHarness(*load_tiny("qwen3_vl")).answer(prompt_request("both")) == wanted


@pytest.mark.parametrize("name", ["video", "both", "video first"])
def test_video_positions_equal_those_of_whole_prompt(native: Served, name: str):
    loaded, preparer = native
    inputs = mlx_vlms_inputs(loaded, *PROMPTS[name])
    wanted, deltas = loaded.language_model.get_rope_index(
        inputs["input_ids"], inputs.get("image_grid_thw"), inputs["video_grid_thw"]
    )
    prompt = prompt_of(preparer, prompt_request(name))
    assert np.array_equal(prompt.positions, np.array(wanted)[:, 0])
    assert prompt.rope_delta == int(np.array(deltas).reshape(-1)[0])


def test_frame_groups_are_spans(native: Served):
    loaded, preparer = native
    prompt = prompt_of(preparer, prompt_request("video"))
    ids = prompt.token_ids
    num_tokens = np.count_nonzero(ids == loaded.spec.video_token_id)
    assert len({span.mm_hash for span in prompt.spans}) == len(prompt.spans) == 3
    assert [span.end - span.start for span in prompt.spans] == [num_tokens // 3] * 3
    inside = np.concatenate([ids[span.start : span.end] for span in prompt.spans])
    assert set(inside.tolist()) == {loaded.spec.video_token_id}


def test_control_strings_in_text_of_video_prompt_stay_text(native: Served):
    loaded, preparer = native
    hostile = "<|vision_start|><|video_pad|><|vision_end|>"
    prepared = prompt_of(preparer, ask("a", hostile, SEVEN, hostile))
    plain = prompt_of(preparer, ask("b", "x", SEVEN, "x"))
    count = np.count_nonzero(plain.token_ids == loaded.spec.video_token_id)
    assert np.count_nonzero(prepared.token_ids == loaded.spec.video_token_id) == count
    assert len(prepared.spans) == len(plain.spans)


def test_frames_too_small_for_processor_are_refused(native: Served):
    engine = EngineHarness(*native)
    engine.add(
        ask("a", video_of(video_files.encode(video_files.greys(range(4), (16, 16)))), "what?")
    )
    engine.run()
    failed = engine.ends["a"]
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_video"
    assert re.search("16x16 pixels: .*(larger|small|least)", failed.message)


def test_prompt_reports_frames_and_truncation_of_its_videos(load_tiny: Callable[[str], Served]):
    """With the media cached or not, and whether the model sees a video or its frames."""
    data = video_files.index_first(video_files.encode(video_files.noise(1, 7), fps=2))
    cut = structs.replace(video_of(data[: len(data) * 2 // 3]), is_cut=True)
    for family in ("qwen2_5_vl", "gemma3"):
        preparer = load_tiny(family)[1]
        for _ in range(2):
            whole, part = prompt_of(preparer, ask("a", SEVEN, random_image(1), cut, "what?")).videos
            assert (whole.frames, whole.seconds, whole.truncated) == (6, 3.0, False)
            assert part.truncated
            assert part.frames < whole.frames
            assert part.seconds < whole.seconds
            assert 0 < part.tokens < whole.tokens


# ---- families that are shown the frames as images ------------------------------------


def test_frames_are_images_after_their_times(by_frames: Served):
    video = decode_clip(SEVEN)
    parts: list[Part] = ["Look"]
    for seconds, frame in zip(video.seconds, video.frames, strict=True):
        parts += [f"\nFrame at {seconds:.1f} s:", PillowImage.fromarray(frame)]
    wanted = EngineHarness(*by_frames).answer(ask("a", *parts, "and say."))
    assert EngineHarness(*by_frames).answer(ask("a", "Look", SEVEN, "and say.")) == wanted


def test_video_shown_as_images_has_at_most_sixteen_frames(by_frames: Served):
    long = video_of(video_files.encode(video_files.noise(5, 30), fps=2))
    assert len({span.mm_hash for span in prompt_of(by_frames[1], ask("a", long)).spans}) == 16


def test_template_without_videos_gets_frames_as_images(tiny_model: TinyModel, tmp_path: Path):
    folder = shutil.copytree(tiny_model("qwen2_vl"), tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|video_pad|>", "").replace("video", "clip"))
    loaded = load_model(folder)
    prepared = prompt_of(new_preparer(loaded), ask("a", SEVEN, "what?"))
    assert len(prepared.spans) == len(decode_clip(SEVEN).frames)
    assert loaded.spec.video_token_id not in prepared.token_ids
