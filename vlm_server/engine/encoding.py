"""Encodes media: in one go, or in turns with the steps of the thread that decodes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from vlm_server.cache.caches import EncodedImage
from vlm_server.engine.inbox import EncodeDone, Inbox
from vlm_server.errors import InternalError, RequestError
from vlm_server.interfaces import Encoder, EncodeWork, Encoding

logger = logging.getLogger(__name__)

_MOST_LONG_STEPS = 4
"""After which a turn is due: prompts may come without end."""


class _Call:
    """An encode of several media together; if that fails, of each alone.

    So no request's image fails because of another's.
    """

    def __init__(self, works: Sequence[EncodeWork]) -> None:
        self._works = works
        self._outcomes: list[EncodedImage | RequestError] = []
        self._has_failed = False
        self.left: list[Sequence[EncodeWork]] = [works]
        """Groups of media that are still to be encoded, each in one go."""
        self.started = time.perf_counter()

    @property
    def is_begun(self) -> bool:
        """Whether any encode of it has succeeded or failed."""
        return self.left[0] is not self._works

    def succeed(self, made: Sequence[EncodedImage]) -> None:
        """The next of `left` are encoded."""
        self._outcomes += made
        del self.left[0]

    def fail(self, error: BaseException) -> None:
        """The next of `left` can't be encoded together."""
        failed = self.left.pop(0)
        if not isinstance(error, RequestError):
            logger.error("encoding %d images failed", len(failed), exc_info=error)
            error = InternalError("The model failed while encoding a picture.")
        self._has_failed = True
        if len(failed) > 1:
            self.left = [[work] for work in failed]
        else:
            self._outcomes.append(error)

    def done(self, *, is_measured: bool = True) -> EncodeDone:
        """The outcome, once nothing is left."""
        seconds = time.perf_counter() - self.started
        names = ", ".join(f"{work.span_index} of {work.request_id}" for work in self._works)
        logger.debug("encoded %s in %.1f ms", names, 1000 * seconds)
        measured = seconds if is_measured else None
        return EncodeDone(self._works, self._outcomes, math.inf if self._has_failed else measured)


def encode(encoder: Encoder, works: Sequence[EncodeWork]) -> EncodeDone:
    """Encode media of one size in one go, whatever happens."""
    call = _Call(works)
    while call.left:
        try:
            call.succeed(encoder.encode(call.left[0]))
        except BaseException as error:  # noqa: BLE001  logged by `fail`; a Rust panic is one
            call.fail(error)
    return call.done()


class EncoderInTurns:
    """An encoder on the inference thread, which launches a part of its work after each step.

    A device that does two things at once does both slowly: a decode step beside an encode would
    take as long as the encode. In turns, it waits for a part of it, and not after a step that was
    long already. No turn waits for more than a part, so that the loop takes in what comes.
    """

    def __init__(self, encoder: Encoder, inbox: Inbox) -> None:
        self._encoder = encoder
        self._inbox = inbox
        self._call: _Call | None = None
        self._encoding: Encoding | None = None
        """Of the next that is left of the call, once it was begun."""
        self._is_launched = False
        """Whether all of its parts are."""
        self._num_long_steps = 0
        """Since the last turn."""
        self._is_measured = True

    @property
    def needs_turns(self) -> bool:
        """Whether there is anything to encode."""
        return self._call is not None

    def start(self, works: Sequence[EncodeWork]) -> None:
        """Take `works`, to be encoded in one call."""
        assert self._call is None
        self._call = _Call(works)
        self._num_long_steps, self._is_measured = 0, True

    def advance_encode(self, *, is_alone: bool, is_long: bool) -> None:
        """Launch a part; if all were launched before, take the features."""
        call = self._call
        if call is None:
            return
        self._is_measured &= is_alone
        has_ended = self._encoding is not None and self._is_launched
        if is_long and not has_ended and self._num_long_steps < _MOST_LONG_STEPS:
            self._num_long_steps += 1
            return
        self._num_long_steps = 0
        if self._encoding is None and not call.is_begun:
            call.started = time.perf_counter()
        try:
            made = self._advance(call.left[0])
        except Exception as error:  # noqa: BLE001  logged by `fail`
            self._encoding = None
            call.fail(error)
        else:
            if made is not None:
                self._encoding = None
                call.succeed(made)
        if not call.left:
            self._call = None
            self._inbox.put(call.done(is_measured=self._is_measured))

    def _advance(self, works: Sequence[EncodeWork]) -> Sequence[EncodedImage] | None:
        """The features, if all parts had been launched before."""
        if self._encoding is None:
            self._encoding, self._is_launched = self._encoder.begin(works), False
        if self._is_launched:
            return self._encoding.result()
        self._is_launched = not self._encoding.advance()
        return None
