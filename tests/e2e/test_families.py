"""Each family answers in a real daemon: text, an image, a video, two requests at once.

All families whose tiny model a daemon can load."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support import video_files
from tests.support.daemons import Daemon, checkpoint, running_daemon
from tests.support.images import noise, user
from tests.support.whole_run import few_of
from tests.tiny_models import FAMILIES

SHRUNK = frozenset({"gemma3n", "fastvlm"})
"""Their towers have one size in mlx-vlm's code, which the tiny models change in this process alone:
the real daemon would want the large one."""
SERVED = [family for family in FAMILIES if family not in SHRUNK]
FEW = ("gemma3",)
"""Without M-RoPE. Most other tests ask a model of Qwen's."""
MAX_TOKENS = 8
TEXT = user("What is the capital of France?")
IMAGE = user(noise(1, (96, 64)), "What is this?")
OTHER_IMAGE = user(noise(2, (64, 96)), "What is this?")


@pytest.fixture(scope="module", params=few_of(SERVED, FEW))
def family_daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp(request.param)
    with running_daemon(folder, "--model", str(checkpoint(request.param))) as running:
        yield running


def tokens_of(daemon: Daemon, message: dict[str, Any]) -> int:
    """The number of tokens of the answer; a random model's text may be anything."""
    answer = daemon.client().chat.completions.create(
        model="default", messages=[message], temperature=0, max_tokens=MAX_TOKENS
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    return answer.usage.completion_tokens


def test_family_answers_text(family_daemon: Daemon):
    assert tokens_of(family_daemon, TEXT)


def test_family_answers_image(family_daemon: Daemon):
    assert tokens_of(family_daemon, IMAGE)


def test_family_answers_video(family_daemon: Daemon):
    url = video_files.data_url(video_files.encode(video_files.moving("left", 8, (96, 64))), "mp4")
    video = {"type": "video_url", "video_url": {"url": url}}
    text = {"type": "text", "text": "What happens?"}
    assert tokens_of(family_daemon, {"role": "user", "content": [video, text]})


def test_family_answers_image_batched_with_text(family_daemon: Daemon):
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(tokens_of, family_daemon, question) for question in (TEXT, OTHER_IMAGE)
        ]
        assert all(future.result() for future in futures)
    family_daemon.wait_idle()
