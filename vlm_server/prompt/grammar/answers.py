"""The engine's side of the process that follows a request's answers: tokens out, masks in."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import RequestError
from vlm_server.prompt.grammar.constraints import Constraint
from vlm_server.prompt.grammar.peer import MASK, TOKENS, Peer

_LATE_NICENESS = 15
_FREE_SECONDS = 0.005
"""CPU time that each mask may take without being counted."""
_TOO_COMPLEX = "it is too complex to follow"
_TOO_SLOW = "it is too slow to follow"
_TOO_LARGE = "it is too slow to follow, or takes too much memory"


class MaskReply(NamedTuple):
    """A mask of allowed tokens, as bits, and the tokens that the grammar forces next, if known.

    An empty mask: the answer can't go on.
    """

    mask: bytes
    forced: tuple[int, ...]


class AnswerProcess:
    """The process that follows the answers of one request, and its replies."""

    def __init__(
        self, process: Peer, mask_bytes: int, follow_seconds: float, num_open: int
    ) -> None:
        self._process = process
        self._size = MASK.size + mask_bytes
        self._seconds_left = follow_seconds
        self._num_open = num_open
        self._asked: list[int] = []
        """Choices that wait for a mask, in order of request."""
        self.replies = dict[int, list[MaskReply]]()
        """Replies that no matcher has taken, by choice, in order of request."""
        self.fault: str | None = None
        """Why the process ended; all answers of the request fail with it."""

    def ask(self, choice: int, sampled: Sequence[int], ahead: Sequence[int]) -> None:
        """Request a mask after the `sampled` tokens, if any, and one after each one `ahead`."""
        self._asked += [choice] * (bool(sampled) + len(ahead))
        token_ids = struct.pack(f"<{len(sampled) + len(ahead)}I", *sampled, *ahead)
        try:
            self._process.send(TOKENS.pack(choice, len(sampled), len(ahead)) + token_ids)
        except OSError:
            self._fail(_TOO_LARGE)

    def waits_for(self, choice: int) -> bool:
        return choice in self._asked

    def read(self, seconds: float) -> bool:
        """Receive replies, waiting up to `seconds` for the first; returns whether any came."""
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
            replies_of_choice = self.replies.setdefault(self._asked.pop(0), [])
            replies_of_choice.append(MaskReply(mask, tuple(forced[:num_forced])))
            self._seconds_left -= max(spent - _FREE_SECONDS, 0.0)
        if self._seconds_left < 0:
            self._fail(_TOO_SLOW)
        return bool(replies)

    def yield_to_others(self) -> None:
        """Lower the process's priority."""
        self._process.be_nice(_LATE_NICENESS)

    def close_one(self) -> None:
        """Close one answer; the last one ends the process."""
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


class RemoteMatcher:
    """The `AnswerMatcher` of one answer. End tokens are allowed where the grammar may end."""

    can_look_ahead = True

    def __init__(
        self,
        answers: AnswerProcess,
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
        """Flags of pending replies: whether each is for `look_ahead`."""
        self._ahead: list[NDArray[np.bool_]] = []
        self.forced: tuple[int, ...] = ()
        self.fault: RequestError | None = None
        """Why the answer can't go on, if it can't."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens; `allowed` is valid once `wait` returns true."""
        if self.fault is None and token_ids:
            self._is_ahead.append(False)
            self._answers.ask(self._choice, token_ids, ())

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Request the masks after each of these draft tokens: see `ahead`."""
        self._take_replies()
        self._ahead = []
        if self.fault is None and token_ids:
            self._is_ahead += [True] * len(token_ids)
            self._answers.ask(self._choice, (), token_ids)

    def wait(self, seconds: float) -> bool:
        """Whether `allowed` and `ahead` are known, within `seconds`."""
        answers, deadline = self._answers, time.monotonic() + seconds
        while answers.waits_for(self._choice):
            left = deadline - time.monotonic()
            if not answers.read(max(left, 0.0)) and left <= 0:
                return False
        self._take_replies()
        return True

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,) bool: allowed next tokens; none if the answer can't go on."""
        self._take_replies()
        if self._answers.fault:
            self.fault = self._constraint.refusal(self._answers.fault)
            self._allowed = unpacked(b"", self._vocabulary_size)
        return self._allowed

    def ahead(self) -> Sequence[NDArray[np.bool_]]:
        """(vocabulary,) bool after each token of `look_ahead`, while those are allowed."""
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
        """Lower the priority of the process, whose masks come late."""
        self._answers.yield_to_others()

    def close(self) -> None:
        """Stop following the answer. Closing twice is no error."""
        if not self._is_closed:
            self._is_closed = True
            self._answers.close_one()


def unpacked(mask: bytes, vocabulary_size: int) -> NDArray[np.bool_]:
    """(vocabulary,) bool: the bits of `mask`; all False for an empty one."""
    if not mask:
        return np.zeros(vocabulary_size, dtype=np.bool_)
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return bits[:vocabulary_size].view(np.bool_)
