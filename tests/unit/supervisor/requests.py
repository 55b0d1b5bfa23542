"""Requests of any size, without their bytes."""

from __future__ import annotations

from vlm_server.protocol import (
    Image,
    ImagePart,
    Message,
    SamplingParams,
    Submit,
    TextPart,
    Video,
    VideoPart,
)

LONG = "x" * 50_000
SCREENSHOT = (1920, 1080)


def ask(
    request_id: str = "r",
    text: str = "What?",
    *sizes: tuple[int, int],
    n: int = 1,
    max_side: int | None = None,
    video_bytes: tuple[int, ...] = (),
) -> Submit:
    """A message with images of `sizes` and videos of so many bytes."""
    images = tuple(Image(b"", "hash", "PNG", w, h, "param", max_side) for w, h in sizes)
    videos = tuple(Video(bytes(size), "hash", "MP4", "param") for size in video_bytes)
    parts = (
        *map(ImagePart, range(len(images))),
        *map(VideoPart, range(len(videos))),
        TextPart(text),
    )
    return Submit(request_id, (Message("user", parts),), images, SamplingParams(n=n), videos)
