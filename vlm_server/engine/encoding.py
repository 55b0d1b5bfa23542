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


class EncoderInTurns:
    """Encodes media on the inference thread, a part after each step.

    A device that does two things at once does both slowly: a decode step beside an encode would
    take as long as the encode. In turns, it waits for a part of it, and not after a step that was
    long already. No turn waits for more than a part, so that the loop takes in what comes.
    """

    def __init__(self, encoder: Encoder, inbox: Inbox) -> None:
        self._encoder = encoder
        self._inbox = inbox
        self._works: Sequence[EncodeWork] = ()
        self._left: list[Sequence[EncodeWork]] = []
        """What is encoded together, of those; the first was begun if there is an encoding."""
        self._outcomes: list[EncodedImage | RequestError] = []
        self._encoding: Encoding | None = None
        self._is_launched = False
        """Whether all of its parts are."""
        self._started = 0.0
        self._num_long_steps = 0
        """Since the last turn."""
        self._is_measured = True
        self._has_failed = False

    @property
    def needs_turns(self) -> bool:
        """Whether there is anything to encode."""
        return bool(self._works)

    def start(self, works: Sequence[EncodeWork]) -> None:
        assert not self._works
        self._works, self._left, self._outcomes = works, [works], []
        self._num_long_steps, self._is_measured, self._has_failed = 0, True, False

    def take_turn(self, *, is_alone: bool, is_long: bool) -> None:
        """Launch a part; if all were launched before, take the features."""
        if not self._works:
            return
        self._is_measured &= is_alone
        has_ended = self._encoding is not None and self._is_launched
        if is_long and not has_ended and self._num_long_steps < _MOST_LONG_STEPS:
            self._num_long_steps += 1
            return
        self._num_long_steps = 0
        if self._works is self._left[0] and self._encoding is None:
            self._started = time.perf_counter()
        try:
            made = self._advance()
        except RequestError as error:
            self._fail(error)
        except Exception:
            logger.exception("encoding %d pictures failed", len(self._left[0]))
            self._fail(_failure())
        else:
            if made is not None:
                self._outcomes += made
                self._encoding = None
                del self._left[0]
        if not self._left:
            self._end()

    def _advance(self) -> Sequence[EncodedImage] | None:
        """The features, if all parts had been launched before."""
        if self._encoding is None:
            self._encoding, self._is_launched = self._encoder.begin(self._left[0]), False
        if self._is_launched:
            return self._encoding.result()
        self._is_launched = not self._encoding.advance()
        return None

    def _fail(self, error: RequestError) -> None:
        """What failed together is encoded alone: nobody's picture fails because of another's."""
        self._encoding, self._has_failed = None, True
        failed = self._left.pop(0)
        if len(failed) > 1:
            self._left = [[work] for work in failed]
        else:
            self._outcomes.append(error)

    def _end(self) -> None:
        seconds = time.perf_counter() - self._started
        _log(self._works, seconds)
        measured = seconds if self._is_measured else None
        done = EncodeDone(self._works, self._outcomes, math.inf if self._has_failed else measured)
        self._works, self._outcomes = (), []
        self._inbox.put(done)


def encode(encoder: Encoder, works: Sequence[EncodeWork]) -> EncodeDone:
    """What `encoder` makes of `works`; if they fail together, of each alone.

    So nobody's picture fails because of another's.
    """
    started = time.perf_counter()
    try:
        made = encoder.encode(works)
    except RequestError as error:
        return _after(error, encoder, works)
    except BaseException:
        logger.exception("encoding %d pictures failed", len(works))
        return _after(_failure(), encoder, works)
    seconds = time.perf_counter() - started
    _log(works, seconds)
    return EncodeDone(works, made, seconds)


def _log(works: Sequence[EncodeWork], seconds: float) -> None:
    names = ", ".join(f"{work.span_index} of {work.request_id}" for work in works)
    logger.debug("encoded %s in %.1f ms", names, 1000 * seconds)


def _failure() -> RequestError:
    return InternalError("The model failed while encoding a picture.")


def _after(error: RequestError, encoder: Encoder, works: Sequence[EncodeWork]) -> EncodeDone:
    """What becomes of `works`, which failed with `error` together."""
    if len(works) == 1:
        return EncodeDone(works, [error], math.inf)
    outcomes = [outcome for work in works for outcome in encode(encoder, [work]).outcomes]
    return EncodeDone(works, outcomes, math.inf)
