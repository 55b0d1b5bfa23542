"""Refuses requests of a size that crashed the engine twice.

A request can crash the engine by what it allocates: a GPU out of memory ends the process, and no
code can catch that. If the client retries, it crashes the next engine too. So the sizes of the
requests on the device are recorded at each crash; after the second one within
`engine.quarantine_seconds`, requests of that size are refused.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from vlm_server.errors import RequestTooCostly
from vlm_server.protocol import Image, Submit, TextPart

logger = logging.getLogger(__name__)

_DEATHS = 2
"""A single crash may have another cause."""
_MAX_NOTES = 64
_SMALL_TEXT_CHARACTERS = 16_384
"""Summed over all choices. Text up to this size, about 4,000 English tokens, does not crash an
engine, and ordinary chat must not be refused because it was running during a crash."""


class Shape(NamedTuple):
    """What determines a request's memory, each rounded to a power of two; 0 means none.

    Rounding gives a screenshot that is one pixel wider the same shape. Small text counts as none.
    """

    largest_image_pixels: int
    total_image_pixels: int
    video_bytes: int
    text_characters: int
    choices: int

    def __str__(self) -> str:
        return ", ".join(measure for measure, _ in self._measures())

    @property
    def advice(self) -> str:
        """What a client can reduce."""
        return ", ".join(remedy for _, remedy in self._measures())

    def _measures(self) -> Iterator[tuple[str, str]]:
        if self.total_image_pixels:
            total, largest = self.total_image_pixels, self.largest_image_pixels
            yield (
                f"images of about {total:,} pixels, the largest of {largest:,}",
                "smaller or fewer images",
            )
        if self.video_bytes:
            yield f"videos of about {self.video_bytes:,} bytes", "a shorter video"
        if self.text_characters:
            yield f"about {self.text_characters:,} characters of text", "less text"
        if self.choices > 1:
            yield f"about {self.choices} choices", "a smaller `n`"


def shape_of(submit: Submit) -> Shape | None:
    """The shape of a request; None for a small one with only text."""
    texts = (p for m in submit.messages for p in m.content if isinstance(p, TextPart))
    num_characters = sum(len(part.text) for part in texts)
    is_small = num_characters * submit.sampling.n <= _SMALL_TEXT_CHARACTERS
    if is_small and not submit.has_media:
        return None
    pixels = [_pixels(image) for image in submit.images]
    return Shape(
        largest_image_pixels=_rounded(max(pixels, default=0)),
        total_image_pixels=_rounded(sum(pixels)),
        video_bytes=_rounded(sum(len(video.data) for video in submit.videos)),
        text_characters=0 if is_small else _rounded(num_characters),
        choices=_rounded(submit.sampling.n),
    )


class Quarantine:
    """Refuses the shapes that two engines crashed on within `seconds`.

    A request is suspected while the device works on it, from `working` to its first token.
    `clock` gives seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.num_refused = 0
        self._seconds = seconds
        self._clock = clock
        self._shapes: dict[str, Shape] = {}
        """Of requests that have neither a token nor ended, by id."""
        self._working: dict[str, Shape] = {}
        """Of those on the device, by id; some may have been aborted since."""
        self._notes: deque[tuple[float, Shape]] = deque(maxlen=_MAX_NOTES)
        """(time of a crash, shape on the device), once per crash and shape."""

    @property
    def num_shapes(self) -> int:
        """Number of shapes that are refused now."""
        return sum(self._seconds_left(shape) > 0 for shape in {shape for _, shape in self._notes})

    @property
    def num_tracked(self) -> int:
        return len(self._shapes)

    def admit(self, request_id: str, shape: Shape | None) -> None:
        """Admit a request. Raises RequestTooCostly for a shape in quarantine."""
        if shape is None:
            return
        seconds = self._seconds_left(shape)
        if seconds > 0:
            self.num_refused += 1
            raise RequestTooCostly(
                f"The engine crashed {_DEATHS} times on requests of this size ({shape}). "
                f"Reduce it ({shape.advice}), or try again in {math.ceil(seconds)} seconds.",
                retry_after_seconds=seconds,
            )
        self._shapes[request_id] = shape

    def working(self, request_ids: Iterable[str]) -> None:
        """The device works on these requests now, and on no others."""
        known = self._working | self._shapes
        self._working = {one: known[one] for one in request_ids if one in known}

    def acquit(self, request_id: str) -> None:
        """The request has a token or has failed: it can't be blamed for a crash any more."""
        self._shapes.pop(request_id, None)
        self._working.pop(request_id, None)

    def finish(self, request_id: str) -> None:
        """The request is over. If it was aborted, the device may still work on its images."""
        self._shapes.pop(request_id, None)

    def engine_ended(self, *, is_death: bool) -> None:
        """Forget all requests; after a crash, record the shapes that were on the device."""
        shapes = set(self._working.values())
        self._shapes.clear()
        self._working.clear()
        for shape in shapes if is_death else ():
            logger.warning("the engine crashed while it worked on a request with %s", shape)
            self._notes.append((self._clock(), shape))

    def _seconds_left(self, shape: Shape) -> float:
        """How long `shape` is refused from now on; 0 or less if it isn't."""
        deaths = [when for when, noted in self._notes if noted == shape]
        if len(deaths) < _DEATHS:
            return 0.0
        return deaths[-_DEATHS] + self._seconds - self._clock()


def _pixels(image: Image) -> int:
    """At the size the model gets it."""
    longest = max(image.width, image.height, 1)
    scale = min(1.0, (image.max_side_pixels or longest) / longest)
    return math.ceil(image.width * image.height * scale**2)


def _rounded(value: int) -> int:
    """The nearest power of two on a logarithmic scale.

    Common sizes are powers of two themselves, so they lie in the middle of a rounding interval.
    """
    return 1 << round(math.log2(value)) if value else 0
