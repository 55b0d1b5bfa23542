"""Follows the answers of a request: tells another process the tokens, and takes its masks."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import RequestError
from vlm_server.prompt.grammar.constraint import Constraint
from vlm_server.prompt.grammar.peer import Peer
from vlm_server.prompt.grammar.wire import MASK, TOKENS

_LATE_NICENESS = 15
_FREE_SECONDS = 0.005
"""CPU time that each mask may take without being counted."""
_TOO_COMPLEX = "it is too complex to follow"
_TOO_SLOW = "it is too slow to follow"
_TOO_LARGE = "it is too slow to follow, or takes too much memory"


class Reply(NamedTuple):
    """mask: empty if the answer can't go on so. forced: what must come next, if that is known."""

    mask: bytes
    forced: tuple[int, ...]


class Answers:
    """The process that follows the answers of one request, and what it said."""

    def __init__(
        self, process: Peer, mask_bytes: int, follow_seconds: float, num_open: int
    ) -> None:
        self._process = process
        self._size = MASK.size + mask_bytes
        self._seconds_left = follow_seconds
        self._num_open = num_open
        self._asked: list[int] = []
        """The choices whose masks are to come, in this order."""
        self.replies = dict[int, list[Reply]]()
        """What has come for each choice, in the order in which it was asked for."""
        self.fault: str | None = None
        """Why no answer can go on any more; all of them end with it."""

    def ask(self, choice: int, drawn: Sequence[int], ahead: Sequence[int]) -> None:
        """A mask after the tokens that were `drawn`, if any, and after each of those `ahead`."""
        self._asked += [choice] * (bool(drawn) + len(ahead))
        token_ids = struct.pack(f"<{len(drawn) + len(ahead)}I", *drawn, *ahead)
        try:
            self._process.send(TOKENS.pack(choice, len(drawn), len(ahead)) + token_ids)
        except OSError:
            self._fail(_TOO_LARGE)

    def waits_for(self, choice: int) -> bool:
        return choice in self._asked

    def read(self, seconds: float) -> bool:
        """Take what has come, waiting for the first of it; whether anything came."""
        if not self._asked:
            return False
        try:
            replies = self._process.take(self._size, seconds)
        except (OSError, EOFError):
            self._fail(_TOO_LARGE)
            return True
        for reply in replies:
            can_go_on, spent, num_forced, *forced = MASK.unpack_from(reply)
            mask = reply[MASK.size :] if can_go_on else b""
            told = self.replies.setdefault(self._asked.pop(0), [])
            told.append(Reply(mask, tuple(forced[:num_forced])))
            self._seconds_left -= max(spent - _FREE_SECONDS, 0.0)
        if self._seconds_left < 0:
            self._fail(_TOO_SLOW)
        return bool(replies)

    def yield_to_others(self) -> None:
        """Go on at a low priority."""
        self._process.be_nice(_LATE_NICENESS)

    def close_one(self) -> None:
        """One answer less; after the last one the process is gone."""
        self._num_open -= 1
        if self._num_open == 0:
            if self._asked:
                self._process.kill()
            self._process.close()
            self._asked.clear()

    def _fail(self, fault: str) -> None:
        self.fault = self.fault or fault
        self._process.kill()
        self._asked.clear()


class AnswerMatcher:
    """Follows one answer, token by token. End tokens are allowed where it may end."""

    can_look_ahead = True

    def __init__(
        self,
        answers: Answers,
        choice: int,
        constraint: Constraint,
        first: NDArray[np.bool_],
        vocabulary_size: int,
    ) -> None:
        self._answers = answers
        self._choice = choice
        self._constraint = constraint
        self._allowed = first
        self._vocabulary_size = vocabulary_size
        self._is_closed = False
        self._is_ahead: list[bool] = []
        """Of each reply that is to come, whether it answers `look_ahead`."""
        self._ahead: list[NDArray[np.bool_]] = []
        self.forced: tuple[int, ...] = ()
        self.fault: RequestError | None = None
        """Why the answer can't go on, if it can't."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """They were drawn; `allowed` is to be asked for when `wait` says so."""
        if self.fault is None and token_ids:
            self._is_ahead.append(False)
            self._answers.ask(self._choice, token_ids, ())

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Ask what may follow each of these; see `ahead`."""
        self._take_replies()
        self._ahead = []
        if self.fault is None and token_ids:
            self._is_ahead += [True] * len(token_ids)
            self._answers.ask(self._choice, (), token_ids)

    def wait(self, seconds: float) -> bool:
        """Whether `allowed` and `ahead` are known, waiting for them no longer than this."""
        answers, deadline = self._answers, time.monotonic() + seconds
        while answers.waits_for(self._choice):
            left = deadline - time.monotonic()
            if not answers.read(max(left, 0.0)) and left <= 0:
                return False
        self._take_replies()
        return True

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,): which tokens may come next; none if the answer can't go on."""
        self._take_replies()
        if self._answers.fault:
            self.fault = self._constraint.refusal(self._answers.fault)
            self._allowed = unpacked(b"", self._vocabulary_size)
        return self._allowed

    def ahead(self) -> Sequence[NDArray[np.bool_]]:
        """(vocabulary,) after each token of `look_ahead`, as far as they may come."""
        self._take_replies()
        return self._ahead

    def _take_replies(self) -> None:
        replies = self._answers.replies.pop(self._choice, [])
        for reply in replies:
            if self._is_ahead.pop(0):
                if reply.mask:
                    self._ahead.append(unpacked(reply.mask, self._vocabulary_size))
                continue
            self._ahead, self.forced = [], reply.forced
            self._allowed = unpacked(reply.mask, self._vocabulary_size)
            if not self._allowed.any():
                self.fault = self._constraint.refusal(_TOO_COMPLEX)

    def yield_to_others(self) -> None:
        """Its masks come late: compute them at a low priority."""
        self._answers.yield_to_others()

    def close(self) -> None:
        """Nobody follows the answer any more. Closing twice is no error."""
        if not self._is_closed:
            self._is_closed = True
            self._answers.close_one()


def unpacked(mask: bytes, vocabulary_size: int) -> NDArray[np.bool_]:
    """(vocabulary,): the bits of `mask`; none of an empty one."""
    if not mask:
        return np.zeros(vocabulary_size, dtype=np.bool_)
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return bits[:vocabulary_size].view(np.bool_)
