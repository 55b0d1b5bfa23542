"""Two thousand damaged images and clips are decoded or refused, in bounded time and memory.

Deterministic. `VLM_MUTATIONS` multiplies the numbers for a longer run by hand:

    VLM_MUTATIONS=20 scripts/test tests/unit/prompt/media/test_mutated_media.py
"""

from __future__ import annotations

import io
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from PIL import Image as PillowImage

from tests.support import video_files
from tests.support.image_files import heic
from tests.support.images import random_image
from vlm_server import settings
from vlm_server.api.parsing.media import image_header, video_header
from vlm_server.errors import InvalidImage, InvalidRequest, InvalidVideo, PayloadTooLarge
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.media.decoders import DecodeBudget, Decoders
from vlm_server.protocol import Image, Video

TIMES = int(os.environ.get("VLM_MUTATIONS", "1"))
IMAGES = {
    "PNG": 350,
    "APNG": 150,
    "JPEG": 350,
    "progressive": 150,
    "WEBP": 250,
    "GIF": 250,
    "TIFF": 100,
    "packed TIFF": 50,
    "BMP": 50,
    "AVIF": 50,
    "HEIC": 50,
}
CLIPS = {"mp4": 80, "webm": 60, "gif": 60}
SOME_CLIPS = 10
"""Clips per format in the default run: each takes a process of its own."""
FORMATS = {"mp4": "MP4", "webm": "WEBM", "gif": "GIF"}
JOB_SECONDS = 20.0
"""The limit for a job of milliseconds: the machine may be busy."""
SIZE = (80, 56)


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    image = settings.ImageSettings(
        decode_timeout_seconds=20 * JOB_SECONDS, max_decode_memory_bytes=512 << 20
    )
    video = settings.VideoSettings(
        decode_timeout_seconds=JOB_SECONDS, max_decode_memory_bytes=1 << 30
    )
    decoders = Decoders(image, video, 2)
    yield decoders
    decoders.close()
    assert decoders.num_tracked == 0


# ---- original files ------------------------------------------------------------------


@cache
def originals(kind: str) -> tuple[bytes, ...]:
    """Two files of a kind, so that parts of one can be spliced into the other."""
    if kind in CLIPS:
        frames = (video_files.noise(seed, 8) for seed in (1, 2))
        return tuple(video_files.encode(clip, kind, options={"g": "4"}) for clip in frames)
    return tuple(_encoded(kind, seed) for seed in (1, 2))


def _encoded(kind: str, seed: int) -> bytes:
    shown, buffer = random_image(seed, *SIZE), io.BytesIO()
    more = {"save_all": True, "append_images": [random_image(seed + 2, *SIZE)]}
    match kind:
        case "APNG":
            shown.save(buffer, "PNG", **more)
        case "progressive":
            shown.save(buffer, "JPEG", progressive=True)
        case "GIF":
            shown.save(buffer, "GIF", **more)
        case "packed TIFF":
            shown.save(buffer, "TIFF", compression="tiff_lzw")
        case "HEIC":
            return heic(shown)
        case _:
            exif = PillowImage.Exif()
            exif[0x0112] = 1
            shown.save(buffer, kind, exif=exif)
    return buffer.getvalue()


# ---- mutations -----------------------------------------------------------------------


def flip(data: bytearray, rng: random.Random, _: bytes) -> bytearray:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def cut(data: bytearray, rng: random.Random, _: bytes) -> bytearray:
    return data[: rng.randrange(1, len(data))]


def drop(data: bytearray, rng: random.Random, _: bytes) -> bytearray:
    start = rng.randrange(len(data))
    del data[start : start + rng.choice((1, 4, 100))]
    return data


def splice(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    """Put a part of another file over or between the bytes."""
    start, size = rng.randrange(len(data)), rng.randrange(1, 400)
    begin = rng.randrange(len(other))
    end = start + rng.choice((0, size))
    data[start:end] = other[begin : begin + size]
    return data


def repeat(data: bytearray, rng: random.Random, _: bytes) -> bytearray:
    start, size = rng.randrange(len(data)), rng.randrange(1, 200)
    data[start:start] = data[start : start + size] * rng.choice((1, 2, 50))
    return data


def lie(data: bytearray, rng: random.Random, _: bytes) -> bytearray:
    """Put a false number among the headers: sizes, counts, lengths, times."""
    form = rng.choice((">H", "<H", ">I", "<I"))
    limit = min(len(data), 512) - 4
    value = rng.choice((0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, rng.randrange(1 << 16)))
    value &= (1 << 8 * struct.calcsize(form)) - 1
    struct.pack_into(form, data, rng.randrange(limit), value)
    return data


def lie_at_the_end(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    """Put a false number at the end, where an MP4 has its index."""
    tail = lie(data[-512:], rng, other)
    return data[:-512] + tail


MUTATIONS: tuple[Callable[[bytearray, random.Random, bytes], bytearray], ...] = (
    *(flip, flip, cut, drop, splice, repeat, lie, lie, lie_at_the_end),
)


def mutated(kind: str, number: int) -> bytes:
    rng = random.Random(f"{kind} {number}")
    data, other = originals(kind)
    mutant = rng.choice(MUTATIONS)(bytearray(data), rng, other)
    return bytes(mutant) or b"\0"


# ---- outcomes ------------------------------------------------------------------------


def not_read(error: InvalidRequest) -> bool:
    assert error.param == "part"
    assert len(error.message) < 200
    return False


def read_image(decoders: Decoders, kind: str, number: int) -> bool:
    """Whether the image was decoded; a refusal must be well-formed."""
    data = mutated(kind, number)
    try:
        header = image_header.read(data, "part", settings.Limits().max_image_pixels)
        image = Image(data, "hash", header.format, header.width, header.height, "part")
        shown = decoders.image(image, DecodeBudget(decoders.image_limits, Cancellation()))
    except InvalidImage as error:
        return not_read(error)
    height, width, channels = shown.shape
    assert channels == 3
    if kind in ("AVIF", "HEIC"):
        assert width * height <= header.width * header.height
    else:
        assert (width, height) in {(header.width, header.height), (header.height, header.width)}
    return True


def read_clip(decoders: Decoders, kind: str, number: int) -> bool:
    data = mutated(kind, number)
    limits = decoders.video_limits
    try:
        header = video_header.read(data, "part")
        video = Video(data, "hash", header.format, "part", header.is_cut)
        shown = decoders.video(video, limits, Cancellation())
    except InvalidVideo as error:
        return not_read(error)
    count, height, width, channels = shown.frames.shape
    assert channels == 3
    assert count == len(shown.seconds) <= limits.max_frames
    assert 0 < max(height, width) <= limits.max_side_pixels
    return True


def check_all(read: Callable[[int], bool], count: int) -> None:
    """Read all, two at a time; both outcomes must occur, or the mutations test nothing."""

    def timed(number: int) -> bool:
        started = time.monotonic()
        try:
            outcome = read(number)
        except (InvalidRequest, PayloadTooLarge) as error:
            raise AssertionError(f"number {number}: {error!r}") from error
        assert time.monotonic() - started < 2 * JOB_SECONDS, f"number {number}"
        return outcome

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(timed, range(count)))
    assert 0 < sum(outcomes) < count


@pytest.mark.parametrize("kind", IMAGES)
def test_mutated_images_are_decoded_or_refused_in_bounds(decoders: Decoders, kind: str):
    check_all(lambda number: read_image(decoders, kind, number), TIMES * IMAGES[kind])


@pytest.mark.parametrize("kind", CLIPS)
def test_sampled_mutated_clips_are_decoded_or_refused(decoders: Decoders, kind: str):
    check_all(lambda number: read_clip(decoders, kind, number), SOME_CLIPS)


@pytest.mark.alone
@pytest.mark.parametrize("kind", CLIPS)
def test_mutated_clips_are_decoded_or_refused_in_bounds(decoders: Decoders, kind: str):
    check_all(lambda number: read_clip(decoders, kind, number), TIMES * CLIPS[kind])


def test_mutation_counts_sum_to_two_thousand():
    assert sum(IMAGES.values()) + sum(CLIPS.values()) == 2000
