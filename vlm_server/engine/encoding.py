"""Encoding of media: without a break, or in turns with the steps of the inference thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import replace

from vlm_server.cache.caches import EncodedImage
from vlm_server.engine.inbox import EncodeDone, Inbox
from vlm_server.errors import InternalError, RequestError
from vlm_server.interfaces import Encoder, EncodeWork

logger = logging.getLogger(__name__)

_Parts = Generator[None, None, EncodeDone]
"""Launches a part of a call between two yields."""


def encode_in_parts(encoder: Encoder, encodes: Sequence[EncodeWork]) -> _Parts:
    """Encode media of one size in one call; if that fails, each alone.

    An image thus never fails because of another request's.
    """
    started_at, has_failed = time.perf_counter(), False
    outcomes: list[EncodedImage | RequestError] = []
    calls = [encodes]
    while calls:
        call = calls.pop(0)
        try:
            encoding = encoder.begin(call)
            while encoding.advance():
                yield
            yield
            outcomes += encoding.result()
        except GeneratorExit:
            raise
        except BaseException as error:  # a Rust panic is one
            has_failed = True
            if not isinstance(error, RequestError):
                logger.exception("encoding %d images failed", len(call))
                error = InternalError("The model failed while encoding an image.")
            if len(call) > 1:
                calls = [[work] for work in call]
            else:
                outcomes.append(error)
        if calls:
            yield
    seconds = time.perf_counter() - started_at
    names = ", ".join(f"{encode.span_index} of {encode.request_id}" for encode in encodes)
    logger.debug("encoded %s in %.1f ms", names, 1000 * seconds)
    return EncodeDone(encodes, outcomes, math.inf if has_failed else seconds)


def encode(encoder: Encoder, encodes: Sequence[EncodeWork]) -> EncodeDone:
    """Encode media of one size without a break. Raises nothing."""
    parts = encode_in_parts(encoder, encodes)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            done: EncodeDone = end.value
            return done


class EncoderInTurns:
    """An encoder on the inference thread, which launches a part of its work after each step.

    A decode step that overlaps with an encode would take as long as the encode. In turns, it waits
    for one part. No turn waits for more than that, so that the loop handles its messages in time.
    """

    def __init__(self, encoder: Encoder, inbox: Inbox) -> None:
        self._encoder = encoder
        self._inbox = inbox
        self._parts: _Parts | None = None
        self._is_measured = True
        """Whether the time of the call is a measure: no step came between its parts."""

    @property
    def has_parts_left(self) -> bool:
        return self._parts is not None

    def start(self, encodes: Sequence[EncodeWork]) -> None:
        """Begin to encode `encodes` in one call, in the next turns."""
        assert self._parts is None
        self._parts = encode_in_parts(self._encoder, encodes)
        self._is_measured = True

    def advance_encode(self, *, is_alone: bool) -> None:
        """Launch the next part; after the last one, post the features."""
        if self._parts is None:
            return
        self._is_measured &= is_alone
        try:
            next(self._parts)
        except StopIteration as end:
            self._parts, encode_done = None, end.value
            has_measure = self._is_measured or encode_done.seconds == math.inf
            self._inbox.put(encode_done if has_measure else replace(encode_done, seconds=None))
