"""Fields about the frames of videos, which all dialects with videos spell alike."""

from __future__ import annotations

from collections.abc import Iterator

from tests.unit.api.fields.field import Body, Field, refused, works

_RATE, _PART = "number of frames", "part of a video"
_VALUES: dict[str, tuple[str, float]] = {
    "fps": (_RATE, 3),
    "video_fps": (_RATE, 3),
    "num_frames": (_RATE, 9),
    "nframes": (_RATE, 9),
    "max_frames": (_RATE, 9),
    "start": (_PART, 0.5),
    "video_start": (_PART, 0.5),
    "end": (_PART, 0.5),
    "video_end": (_PART, 0.5),
    "min_pixels": ("bounds of the size", 5000),
    "max_pixels": ("bounds of the size", 5000),
    "total_pixels": ("bounds of the size", 5000),
}


def of_part(path: str, on: Body) -> tuple[Field, ...]:
    """The fields in an object at `path`, of the last video of the request `on`."""
    return tuple(
        works(concept, f"{path}.{name}", value, on=on) for name, (concept, value) in _VALUES.items()
    )


def of_request(on: Body) -> Iterator[Field]:
    """The fields for all videos of the request `on`."""
    processor, reading = "mm_processor_kwargs", "media_io_kwargs"
    yield from of_part(processor, on)
    yield works(_RATE, f"{processor}.do_sample_frames", False, on=on, fails=400)
    yield works(_RATE, f"{reading}.video.num_frames", 9, on=on)
    yield works(_RATE, f"{reading}.video.fps", 3, on=on)
    yield works(_RATE, "video_fps", 3, on=on)
    for name in (processor, reading, f"{reading}.video"):
        yield refused("in other objects", f"{name}.colour", "red", on=on, title="any")
