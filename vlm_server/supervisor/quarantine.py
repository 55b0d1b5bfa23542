"""Which requests engines died of, by their size. Knows sizes and times; knows no process.

An engine may die of what a request makes it allocate: a GPU out of memory ends the process, and
no code can catch that. Whoever asks again kills the next engine. So the size of what was on the
device is noted, and after the second death within a while, requests of that size are refused.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from vlm_server.errors import RequestTooCostly
from vlm_server.protocol import Image, Submit, TextPart

logger = logging.getLogger(__name__)

_DEATHS = 2
"""One may be chance, or somebody else's doing."""
_MAX_NOTES = 64
_SMALL_TEXT_CHARACTERS = 16_384
"""Of all choices together. A text of up to so much, some 4,000 English tokens, is no cause of a
death, and ordinary chat must not be refused for being there when it happened."""


class Shape(NamedTuple):
    """What a request's cost follows from, each as the nearest power of two; 0 stands for none.

    So a screenshot that is one pixel wider has the same shape. Text that is small counts as none.
    """

    largest_picture_pixels: int
    all_pictures_pixels: int
    video_bytes: int
    text_characters: int
    choices: int

    def __str__(self) -> str:
        return ", ".join(measure for measure, _ in self._measures())

    @property
    def advice(self) -> str:
        """What a client can do to have another shape."""
        return ", ".join(remedy for _, remedy in self._measures())

    def _measures(self) -> Iterator[tuple[str, str]]:
        if self.all_pictures_pixels:
            total, largest = self.all_pictures_pixels, self.largest_picture_pixels
            yield (
                f"pictures of about {total:,} pixels, the largest of {largest:,}",
                "smaller or fewer pictures",
            )
        if self.video_bytes:
            yield f"videos of about {self.video_bytes:,} bytes", "a shorter video"
        if self.text_characters:
            yield f"about {self.text_characters:,} characters of text", "less text"
        if self.choices > 1:
            yield f"about {self.choices} choices", "a smaller `n`"


def shape_of(submit: Submit) -> Shape | None:
    """None for a small request of text alone."""
    texts = (p for m in submit.messages for p in m.content if isinstance(p, TextPart))
    num_characters = sum(len(part.text) for part in texts)
    is_small = num_characters * submit.sampling.n <= _SMALL_TEXT_CHARACTERS
    if is_small and not submit.has_media:
        return None
    pixels = [_pixels(image) for image in submit.images]
    return Shape(
        largest_picture_pixels=_rounded(max(pixels, default=0)),
        all_pictures_pixels=_rounded(sum(pixels)),
        video_bytes=_rounded(sum(len(video.data) for video in submit.videos)),
        text_characters=0 if is_small else _rounded(num_characters),
        choices=_rounded(submit.sampling.n),
    )


class Quarantine:
    """Refuses the shapes that two engines died of within `seconds`; notes expire.

    A request is suspected while the device has it, from `working` to its first token. `clock`
    gives seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_refused = 0
        self._seconds = seconds
        self._clock = clock
        self._shapes: dict[str, Shape] = {}
        """Of requests without a token or an end, by id."""
        self._working: dict[str, Shape] = {}
        """Of those that the device has; they may have been aborted since."""
        self._notes: deque[tuple[float, Shape]] = deque(maxlen=_MAX_NOTES)
        """When an engine died, and of what; each shape once for a death."""

    @property
    def num_shapes(self) -> int:
        """Those that are refused now."""
        return sum(self._seconds_left(shape) > 0 for shape in {shape for _, shape in self._notes})

    @property
    def num_tracked(self) -> int:
        return len(self._shapes)

    def admit(self, submit: Submit) -> None:
        """Let a request in. Raises RequestTooCostly for a shape that killed engines."""
        shape = shape_of(submit)
        if shape is None:
            return
        seconds = self._seconds_left(shape)
        if seconds > 0:
            self.num_refused += 1
            raise RequestTooCostly(
                f"The engine died {_DEATHS} times of requests of this size ({shape}). "
                f"Make it smaller ({shape.advice}), or try again in {math.ceil(seconds)} seconds.",
                retry_after_seconds=seconds,
            )
        self._shapes[submit.request_id] = shape

    def working(self, request_ids: Iterable[str]) -> None:
        """The device has these now, and no others."""
        known = self._working | self._shapes
        self._working = {one: known[one] for one in request_ids if one in known}

    def acquit(self, request_id: str) -> None:
        """It has a token or has failed: it is not what an engine may die of any more."""
        self._shapes.pop(request_id, None)
        self._working.pop(request_id, None)

    def finish(self, request_id: str) -> None:
        """Nothing will be heard of it. If it was aborted, the device may have its picture yet."""
        self._shapes.pop(request_id, None)

    def engine_ended(self, *, is_death: bool) -> None:
        """No request is left; after a death, the shapes that the device had are noted."""
        shapes = set(self._working.values())
        self._shapes.clear()
        self._working.clear()
        for shape in shapes if is_death else ():
            logger.warning("the engine died while it worked on a request with %s", shape)
            self._notes.append((self._clock(), shape))

    def _seconds_left(self, shape: Shape) -> float:
        """How long `shape` is refused from now on; 0 or less if it isn't."""
        deaths = [when for when, noted in self._notes if noted == shape]
        if len(deaths) < _DEATHS:
            return 0.0
        return deaths[-_DEATHS] + self._seconds - self._clock()


def _pixels(image: Image) -> int:
    """As the model is shown it."""
    longest = max(image.width, image.height, 1)
    scale = min(1.0, (image.max_side_pixels or longest) / longest)
    return math.ceil(image.width * image.height * scale**2)


def _rounded(value: int) -> int:
    """The nearest power of two on a logarithmic scale.

    Sizes that are common, themselves powers of two, lie in the middle of what is rounded alike.
    """
    return 1 << round(math.log2(value)) if value else 0
