"""Encodes media: in one go, or in turns with the decode steps of one thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from vlm_server.cache.caches import EncodedImage
from vlm_server.engine.inbox import EncodeDone, Inbox
from vlm_server.errors import InternalError, RequestError
from vlm_server.ports import Encoder, EncodeWork, Encoding

logger = logging.getLogger(__name__)


class EncoderInTurns:
    """Encodes media on the inference thread: while others decode, a part after each step.

    A device that does two things at once does both slowly: a decode step beside an encode would
    take as long as the encode. In turns, it waits for a part of it.
    """

    def __init__(self, encoder: Encoder, inbox: Inbox) -> None:
        self._encoder = encoder
        self._inbox = inbox
        self._works: Sequence[EncodeWork] = ()
        self._encoding: Encoding | None = None
        """What was begun of them."""
        self._is_launched = False
        self._started = 0.0
        self._is_alone = True

    @property
    def needs_turns(self) -> bool:
        """Whether there is anything to encode."""
        return bool(self._works)

    def start(self, works: Sequence[EncodeWork]) -> None:
        assert not self._works
        self._works, self._started, self._is_alone = works, time.perf_counter(), True

    def take_turn(self, *, others_decode: bool) -> None:
        """Launch a part, or all if nobody decodes; what was launched before, wait for.

        So the device has other work while this waits, unless nobody decodes.
        """
        if not self._works:
            return
        self._is_alone &= not others_decode
        try:
            made = self._advance(others_decode=others_decode)
        except RequestError as error:
            self._end(_after(error, self._encoder, self._works))
            return
        except Exception:
            logger.exception("encoding %d pictures failed", len(self._works))
            self._end(_after(_failure(), self._encoder, self._works))
            return
        if made is not None:
            seconds = time.perf_counter() - self._started if self._is_alone else None
            self._end(EncodeDone(self._works, made, seconds))

    def _advance(self, *, others_decode: bool) -> Sequence[EncodedImage] | None:
        """The features, if all of their parts had been launched before."""
        if self._encoding is None:
            self._encoding, self._is_launched = self._encoder.begin(self._works), False
        elif self._is_launched:
            return self._encoding.result()
        while not self._is_launched:
            self._is_launched = not self._encoding.advance()
            if others_decode:
                break
        return None

    def _end(self, done: EncodeDone) -> None:
        self._works, self._encoding = (), None
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
    names = ", ".join(f"{work.span_index} of {work.request_id}" for work in works)
    logger.debug("encoded %s in %.1f ms", names, 1000 * seconds)
    return EncodeDone(works, made, seconds)


def _failure() -> RequestError:
    return InternalError("The model failed while encoding a picture.")


def _after(error: RequestError, encoder: Encoder, works: Sequence[EncodeWork]) -> EncodeDone:
    """What becomes of `works`, which failed with `error` together."""
    if len(works) == 1:
        return EncodeDone(works, [error], math.inf)
    outcomes = [outcome for work in works for outcome in encode(encoder, [work]).outcomes]
    return EncodeDone(works, outcomes, math.inf)
