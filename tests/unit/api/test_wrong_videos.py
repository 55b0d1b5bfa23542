"""Impossible options of videos are refused by field, in every dialect with videos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support import video_files
from tests.support.image_files import data_url, image_file
from tests.unit.api.requests import chat, user
from tests.unit.api.scripted_engine import ScriptedEngine

Body = dict[str, Any]
CLIP = video_files.data_url(video_files.encode(video_files.noise(1, 3)))
FRAMES = [data_url(image_file("PNG", (40, 30), mode)) for mode in ("RGB", "L")]


def as_chat(video: Any, options: Body, **request: Any) -> Body:
    kind = "video" if isinstance(video, list) else "video_url"
    return chat(user({"type": kind, kind: video, **options}), **request)


def as_responses(video: Any, options: Body, **request: Any) -> Body:
    part = {"type": "input_video", "video_url": video, **options}
    message = {"type": "message", "role": "user", "content": [part]}
    return {"model": "demo", "input": [message], **request}


by_dialect = pytest.mark.parametrize(
    ("route", "body", "part"),
    [
        ("/v1/chat/completions", as_chat, "messages[0].content[0]"),
        ("/v1/responses", as_responses, "input[0].content[0]"),
    ],
)


@by_dialect
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"fps": 1e308}, "fps"),
        ({"fps": 0}, "fps"),
        ({"fps": -1}, "fps"),
        ({"fps": 1e-9}, "fps"),
        ({"fps": "many"}, "fps"),
        ({"num_frames": 0}, "num_frames"),
        ({"nframes": 2.5}, "nframes"),
        ({"num_frames": 10**40}, "num_frames"),
        ({"start": -1}, "start"),
        ({"video_end": 1e300}, "video_end"),
        ({"start": 5, "end": 1}, "start"),
        ({"fps": 2, "num_frames": 4}, "num_frames"),
        ({"max_pixels": 0}, "max_pixels"),
    ],
    ids=str,
)
async def test_impossible_option_of_video_is_refused_by_field(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    route: str,
    body: Callable[..., Body],
    part: str,
    options: Body,
    field: str,
) -> None:
    """In a part, and in the request."""
    for wrong in (body(CLIP, options), body(CLIP, {}, mm_processor_kwargs=options)):
        answer = await client.post(route, json=wrong)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        in_request = "mm_processor_kwargs" in wrong
        path = f"mm_processor_kwargs.{field}" if in_request else f"{part}.{field}"
        assert (error["param"], error["code"]) == (path, "invalid_value")
        assert f"`{field}`" in error["message"] or f"`{path}`" in error["message"]
    assert engine.submitted == []


@by_dialect
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_rate_that_is_no_number_is_refused(
    client: httpx.AsyncClient, route: str, body: Callable[..., Body], part: str, value: str
) -> None:
    content = httpx.Request("POST", "http://x", json=body(CLIP, {"fps": 987})).content
    headers = {"content-type": "application/json"}
    content = content.replace(b"987", value.encode())
    answer = await client.post(route, content=content, headers=headers)
    assert answer.status_code == 400, answer.text


@by_dialect
@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "this one has 0"),
        (FRAMES * 5_000, "1 to 1024 images; this one has 10000"),
        (["data:video/jpeg;base64" + ",AAAA" * 10_000], "Frame 0 of the video"),
        ([FRAMES[0], data_url(image_file("PNG", (30, 40)))], "Frame 1 of the video has 30x40"),
        ([FRAMES[0], "file:///etc/passwd"], "urls"),
        ([CLIP, CLIP], "Frame 0 of the video"),
    ],
    ids=["none", "many", "list in list", "sizes", "file", "clips"],
)
async def test_wrong_list_of_frames_is_refused_by_part(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    route: str,
    body: Callable[..., Body],
    part: str,
    frames: list[str],
    words: str,
) -> None:
    answer = await client.post(route, json=body(frames, {}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, part), error
    assert words in error["message"]
    assert engine.submitted == []


@by_dialect
async def test_list_of_frames_reaches_engine_with_its_options(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    route: str,
    body: Callable[..., Body],
    part: str,
) -> None:
    options = {"fps": 0.5, "max_frames": 3}
    wanted = body(FRAMES, options, media_io_kwargs={"video": {"fps": 3}})
    answer = await client.post(route, json=wanted)
    assert answer.status_code == 200, answer.text
    (video,) = engine.submitted[0].videos
    assert (video.format, video.param) == ("FRAMES", part)
    assert (video.sampling.fps, video.sampling.max_frames) == (0.5, 3)
