"""Videos for tests: a disc that moves over a plain ground, in every container that is read."""

from __future__ import annotations

import base64
import io
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image as PillowImage
from PIL import ImageDraw

CODECS = {"mp4": "libx264", "webm": "libvpx", "gif": "gif"}
_PIXELS = {"gif": "rgb8"}
MILLISECOND = Fraction(1, 1000)


def encode(
    frames: Iterable[Any],
    container: str = "mp4",
    codec: str | None = None,
    fps: int = 10,
    times_ms: Sequence[int] | None = None,
    rotation: int = 0,
    options: dict[str, str] | None = None,
) -> bytes:
    """Pillow images as a video; frame i is shown at `times_ms[i]`, or at `fps` a second.

    `rotation` is what a player shall turn it by, in degrees counterclockwise.
    """
    frames = list(frames)
    buffer = io.BytesIO()
    with _own_priority(), av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec or CODECS[container], rate=fps, options=options or {})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = _PIXELS.get(container, "yuv420p")
        if times_ms is not None:
            stream.time_base = stream.codec_context.time_base = MILLISECOND
        if rotation:
            stream.set_display_rotation(rotation)
        for number, image in enumerate(frames):
            frame = av.VideoFrame.from_image(image)
            frame.pts = number if times_ms is None else times_ms[number]
            frame.time_base = Fraction(1, fps) if times_ms is None else MILLISECOND
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


def index_first(mp4: bytes) -> bytes:
    """The same video with its index before its frames, as for players that stream."""
    frames, index = (mp4.index(kind) - 4 for kind in (b"mdat", b"moov"))
    moved = bytearray(mp4[index:])
    table = moved.index(b"stco") + 8
    (count,) = struct.unpack_from(">I", moved, table)
    for place in range(table + 4, table + 4 + 4 * count, 4):
        (offset,) = struct.unpack_from(">I", moved, place)
        struct.pack_into(">I", moved, place, offset + len(moved))
    return mp4[:frames] + bytes(moved) + mp4[frames:index]


@contextmanager
def _own_priority() -> Iterator[None]:
    """SVT-AV1 makes its caller a real-time process where it may, and so all that it starts."""
    if not hasattr(os, "sched_getscheduler"):  # macOS
        yield
        return
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


def moving(
    way: str, count: int = 20, size: tuple[int, int] = (320, 240), radius: int = 36
) -> list[Any]:
    """A red disc that goes left, right, up or down over white, from edge to edge."""
    width, height = size
    frames = []
    for number in range(count):
        at = number / (count - 1)
        at = 1 - at if way in ("left", "up") else at
        x, y = width / 2, height / 2
        if way in ("left", "right"):
            x = radius + at * (width - 2 * radius)
        else:
            y = radius + at * (height - 2 * radius)
        image = PillowImage.new("RGB", size, "white")
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), "red")
        frames.append(image)
    return frames


def greys(levels: Iterable[int], size: tuple[int, int] = (64, 48)) -> list[Any]:
    """Plain frames whose brightness tells which one they are."""
    return [PillowImage.new("RGB", size, (level,) * 3) for level in levels]


def noise(seed: int, count: int = 6, size: tuple[int, int] = (96, 64)) -> list[Any]:
    """Frames of random 16-pixel blocks."""
    rng = np.random.default_rng(seed)
    shape = (count, size[1] // 16, size[0] // 16, 3)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    return [PillowImage.fromarray(frame) for frame in blocks]


def data_url(data: bytes, container: str = "mp4") -> str:
    return f"data:video/{container};base64,{base64.b64encode(data).decode()}"
