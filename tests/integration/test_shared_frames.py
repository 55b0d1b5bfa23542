"""Frames that videos share are encoded once, and requests choose the frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from tests.integration.harness import (
    EngineHarness,
    Part,
    Served,
    ask,
    caches_of,
    prompt_of,
    video_of,
)
from tests.integration.test_videos import BY_FRAMES, LONGER, NATIVE, SEVEN, SMALL
from tests.support import video_files
from tests.support.image_files import data_url, encoded
from vlm_server.api.parsing.media.parse import parse_video
from vlm_server.errors import InvalidRequest
from vlm_server.prompt.media.decoders import Decoders
from vlm_server.protocol import FrameSampling, Video
from vlm_server.settings import Limits

pytestmark = pytest.mark.families("media", "rope")


@pytest.fixture(params=NATIVE + BY_FRAMES, scope="module")
def served(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


@pytest.fixture(params=NATIVE, scope="module")
def native(request: pytest.FixtureRequest, load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny(request.param)


LONG = video_files.encode(video_files.noise(7, 24), fps=4)


def part_of_long(start: float, end: float) -> Video:
    sampling = FrameSampling(fps=2.0, start=start, end=end)
    return structs.replace(video_of(LONG), sampling=sampling)


def answer_and_encodes(engine: EngineHarness, name: str, *parts: Part) -> tuple[list[int], int]:
    """The answer's tokens, and for how many spans pixels were made."""
    tokens = engine.answer(ask(name, *parts, sampling=LONGER))
    return tokens, engine.preparers.num_read[name]


def test_overlapping_parts_encode_shared_frames_once(served: Served):
    """Frames at 2 to 4 seconds are in both parts: two pairs, or four images."""
    num_spans = 4 if served[0].family.takes_videos else 8
    wanted, num_encoded = answer_and_encodes(
        EngineHarness(*served), "b", part_of_long(2, 6), "what?"
    )
    assert num_encoded == num_spans
    engine = EngineHarness(*served, caches=caches_of(served))
    assert answer_and_encodes(engine, "a", part_of_long(0, 4), "what?")[1] == num_spans
    shared = answer_and_encodes(engine, "b", part_of_long(2, 6), "what?")
    assert shared == (wanted, num_spans // 2)
    assert answer_and_encodes(engine, "c", part_of_long(2, 6), "so?")[1] == 0


@pytest.mark.families("media")
def test_requests_of_different_keys_share_no_frames(served: Served):
    engine = EngineHarness(*served, caches=caches_of(served))
    for number, salt in enumerate(("a", "b")):
        submit = structs.replace(ask(salt, part_of_long(0, 2), "what?"), cache_salt=salt)
        engine.answer(submit)
        assert engine.preparers.num_read[salt] > 0, number


@pytest.mark.families("media")
def test_second_question_decodes_nothing(served: Served, monkeypatch: pytest.MonkeyPatch):
    engine = EngineHarness(*served, caches=caches_of(served))
    engine.answer(ask("a", SEVEN, "what?"))
    monkeypatch.setattr(Decoders, "video", None)
    engine.answer(ask("b", "First this.", SEVEN, "and?"))
    assert engine.preparers.num_read["b"] == 0


def frame_list(count: int, **sampling: Any) -> Video:
    urls = [data_url(encoded(image)) for image in video_files.noise(8, count)]
    video = parse_video(urls, "messages[0]", Limits())
    return structs.replace(video, sampling=FrameSampling(**sampling))


@pytest.mark.families("media")
def test_longer_list_of_frames_encodes_new_frames_only(served: Served):
    """An agent sends its frames again, with new ones."""
    engine = EngineHarness(*served, caches=caches_of(served))
    per_span = 2 if served[0].family.takes_videos else 1
    assert answer_and_encodes(engine, "a", frame_list(6, fps=1.0), "what?")[1] == 6 // per_span
    assert answer_and_encodes(engine, "b", frame_list(10, fps=1.0), "what?")[1] == 4 // per_span
    (use,) = engine.prompts["b"].videos
    assert (use.frames, use.times) == (10, tuple(map(float, range(10))))
    assert not served[0].family.takes_videos or (use.width, use.height) in ((96, 64), (84, 56))


@pytest.mark.families("media")
def test_odd_number_of_frames_is_shown_whole(served: Served):
    (use,) = prompt_of(served[1], ask("a", frame_list(5), "what?")).videos
    assert use.frames == 5
    (use,) = prompt_of(served[1], ask("b", frame_list(5, num_frames=1), "what?")).videos
    assert use.frames == 1


@pytest.mark.families("media")
def test_more_frames_than_possible_are_refused_by_field(served: Served):
    sampling = FrameSampling(num_frames=10**9, param="mm_processor_kwargs.num_frames")
    with pytest.raises(InvalidRequest, match="`num_frames` is 1000000000: at most") as refused:
        prompt_of(served[1], ask("a", structs.replace(SEVEN, sampling=sampling)))
    assert refused.value.param == "mm_processor_kwargs.num_frames"


@pytest.mark.families("media")
def test_fewer_pixels_make_fewer_tokens(native: Served):
    sizes = [{}, {"max_pixels": 3000}, {"total_pixels": 3000 * 3}]
    uses = [
        prompt_of(native[1], ask("a", structs.replace(SMALL, sampling=FrameSampling(**size))))
        for size in sizes
    ]
    whole, small, total = (prompt.videos[0] for prompt in uses)
    assert small.tokens < whole.tokens
    assert small.width * small.height <= 3000
    assert total.tokens < whole.tokens


@pytest.mark.families("media")
def test_equal_frames_share_features_and_leave_answer(served: Served):
    urls = [data_url(encoded(image)) for image in video_files.noise(8, 1) * 6]
    still = parse_video(urls, "messages[0]", Limits())
    wanted = EngineHarness(*served).answer(ask("a", still, "what?", sampling=LONGER))
    engine = EngineHarness(*served, caches=caches_of(served))
    assert engine.answer(ask("a", still, "what?", sampling=LONGER)) == wanted
    assert len({span.mm_hash for span in engine.prompts["a"].spans}) == 1
    assert len(engine.prompts["a"].spans) == (3 if served[0].family.takes_videos else 6)
