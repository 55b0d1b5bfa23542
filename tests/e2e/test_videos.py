"""Videos in a real daemon: true answers, refusals, and no harm by bad ones."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support import video_files
from tests.support.daemons import Daemon, wait_until
from tests.support.image_files import encoded
from tests.support.images import image_part, one_shape
from tests.support.whole_run import few_of

pytestmark = pytest.mark.e2e

ENCODINGS = (("mp4", "libx264"), ("webm", "libvpx-vp9"), ("gif", "gif"))
WAYS = ("left", "right", "up", "down")
QUESTION = "Which way does it move?"


def video_part(data: bytes, container: str = "mp4") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": video_files.data_url(data, container)}}


def message(*parts: Any) -> list[Any]:
    texts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": texts}]


def ask(daemon: Daemon, *parts: Any) -> str:
    answer = daemon.client().chat.completions.create(
        model="default", messages=message(*parts), temperature=0, max_tokens=20
    )
    return (answer.choices[0].message.content or "").strip()


def refusal(daemon: Daemon, data: bytes) -> str:
    started = time.monotonic()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(daemon, video_part(data), "what?")
    assert time.monotonic() - started < 5
    assert caught.value.code == "invalid_video"
    assert caught.value.param == "messages[0].content[0]"
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "container", "codec"),
    few_of(
        ((way, *encoding) for way in WAYS for encoding in ENCODINGS),
        (("left", "mp4", "libx264"), ("right", "webm", "libvpx-vp9")),
    ),
)
def test_model_says_which_way_clip_moves(
    daemon: Daemon, way: str, container: str, codec: str
) -> None:
    data = video_files.encode(video_files.moving(way, 30), container, codec)
    assert ask(daemon, video_part(data, container), QUESTION) == way


def test_model_answers_about_video_and_image(daemon: Daemon) -> None:
    video = video_part(video_files.encode(video_files.moving("left", 30)))
    assert ask(daemon, video, "What colour is the circle?") == "red"
    assert ask(daemon, image_part(one_shape("square", "blue")), "What shape is this?") == "square"


def usage_of(daemon: Daemon, part: dict[str, Any], question: str, **fields: Any) -> Any:
    answer = daemon.client().chat.completions.create(
        model="default",
        messages=message(part, question),
        temperature=0,
        max_tokens=20,
        extra_body=fields,
    )
    return answer.usage


def test_second_question_about_part_of_clip_is_cached(daemon: Daemon) -> None:
    part = video_part(video_files.encode(video_files.moving("up", 30), fps=10))
    fields = {"mm_processor_kwargs": {"fps": 4, "start": 1, "end": 2, "max_pixels": 40_000}}
    first = usage_of(daemon, part, QUESTION, **fields)
    (used,) = first.videos
    assert used["times"] == [1, 1.25, 1.5, 1.75]
    assert used["width"] * used["height"] <= 40_000
    second = usage_of(daemon, part, "What colour is the circle?", **fields)
    assert second.videos == first.videos
    assert second.prompt_tokens_details.cached_tokens >= used["tokens"]


@pytest.mark.parametrize("as_qwen", [True, False], ids=["list", "data URL"])
def test_model_says_which_way_frames_of_list_move(daemon: Daemon, as_qwen: bool) -> None:
    frames = [encoded(image, "JPEG") for image in video_files.moving("left", 8)]
    base64s = [base64.b64encode(frame).decode() for frame in frames]
    part = {"type": "video", "video": [f"data:image/jpeg;base64,{each}" for each in base64s]}
    if not as_qwen:
        url = "data:video/jpeg;base64," + ",".join(base64s)
        part = {"type": "video_url", "video_url": {"url": url, "fps": 2}}
    assert ask(daemon, part, QUESTION) == "left"
    (used,) = usage_of(daemon, part, QUESTION).videos
    assert used["times"] == [number / 2 for number in range(8)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_frames": 10**9}, "at most 64"),
        ({"start": 50}, "`start` is at 50 seconds"),
        ({"fps": 1e308}, "fps"),
    ],
    ids=str,
)
def test_impossible_frames_of_clip_are_refused(
    daemon: Daemon, options: dict[str, Any], words: str
) -> None:
    part = video_part(video_files.encode(video_files.moving("up", 10))) | options
    with pytest.raises(openai.BadRequestError, match=words):
        ask(daemon, part, QUESTION)


@pytest.mark.whole
async def test_concurrent_videos_get_their_own_answers(daemon: Daemon) -> None:
    client = daemon.async_client()

    async def answer_to(way: str) -> tuple[str, str]:
        part = video_part(video_files.encode(video_files.moving(way, 24, (256, 256))))
        answer = await client.chat.completions.create(
            model="default", messages=message(part, QUESTION), temperature=0
        )
        return way, (answer.choices[0].message.content or "").strip()

    answers = await asyncio.gather(*(answer_to(way) for way in WAYS * 2))
    assert [wanted for wanted, _ in answers] == [given for _, given in answers]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"#EXTM3U\nfile:///etc/passwd", "not a readable"),
        (video_files.encode(video_files.moving("up"))[:-1], "is truncated"),
        (video_files.encode(video_files.greys([9] * 4, (4096, 2304))), "pixels"),
        (
            video_files.encode(
                video_files.greys([9, 9]), "matroska", "mpeg4", times_ms=[0, 36_000_000]
            ),
            "longer",
        ),
    ],
    ids=["playlist", "cut", "large", "ten hours"],
)
def test_bad_videos_are_refused(daemon: Daemon, data: bytes, words: str) -> None:
    assert words in refusal(daemon, data)
    assert ask(daemon, image_part(one_shape("star", "red")), "What shape is this?") == "star"


def decoders_of(engine_pid: int) -> list[int]:
    command = ["pgrep", "-P", str(engine_pid), "-f", "vlm_server.prompt.media.process video"]
    found = subprocess.run(command, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_killed_decoder_fails_only_its_request(daemon: Daemon) -> None:
    """The decoding process of a long video is stopped, then killed."""
    data = video_files.encode(
        video_files.greys(range(200), (1280, 720)), options={"preset": "ultrafast"}
    )
    engine = daemon.engine_pid()
    found: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(ask, daemon, video_part(data), QUESTION)
        wait_until(lambda: found.extend(decoders_of(engine)) or found, 20, daemon.log)
        os.kill(found[0], signal.SIGSTOP)
        image = image_part(one_shape("circle", "blue"))
        assert ask(daemon, image, "What shape is this?") == "circle"
        os.kill(found[0], signal.SIGKILL)
        with pytest.raises(openai.BadRequestError, match="can't be decoded"):
            pending.result(30)
    assert daemon.engine_pid() == engine
    wait_until(lambda: not decoders_of(engine), 5, daemon.log)
    daemon.wait_idle()
    right = video_files.encode(video_files.moving("right", 30))
    assert ask(daemon, video_part(right), QUESTION) == "right"


def test_disconnected_client_ends_video_decoding(daemon: Daemon) -> None:
    data = video_files.encode(
        video_files.greys(range(200), (1280, 720)), options={"preset": "ultrafast"}
    )
    engine = daemon.engine_pid()
    found: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        client = daemon.client(timeout=1)
        pending = pool.submit(
            client.chat.completions.create,
            model="default",
            messages=message(video_part(data), QUESTION),
        )
        wait_until(lambda: found.extend(decoders_of(engine)) or found, 20, daemon.log)
        os.kill(found[0], signal.SIGSTOP)
        with pytest.raises(openai.APITimeoutError):
            pending.result(30)
    wait_until(lambda: not decoders_of(engine), 10, daemon.log)
    daemon.wait_idle()
