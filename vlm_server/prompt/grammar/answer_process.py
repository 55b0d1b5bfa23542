"""The engine's side of the process that follows a request's answers: sends tokens, gets masks."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import RequestError
from vlm_server.platform.child import messages
from vlm_server.prompt.grammar.constraints import Constraint
from vlm_server.prompt.grammar.forked_process import Follow, ForkedProcess, Masks

_LATE_NICENESS = 15
_FREE_SECONDS = 0.005
"""CPU time of each mask that is not counted."""
_TOO_COMPLEX = "it is too complex to follow"
_TOO_SLOW = "it is too slow to follow"
_TOO_LARGE = "it is too slow to follow, or takes too much memory"


class AnswerProcess:
    """The process that follows the answers of one request, and its replies."""

    def __init__(self, process: ForkedProcess, follow_seconds: float, num_open: int) -> None:
        self.process = process
        self._seconds_left = follow_seconds
        self._num_open = num_open
        self._pending = deque[Follow]()
        """Requests for masks without a reply, in order."""
        self.replies = defaultdict[int, list[tuple[Follow, Masks]]](list)
        """Replies not yet taken by a matcher, by choice, in order of request."""
        self.fault: str | None = None
        """The reason why the process ended; all answers of the request fail with it."""

    def ask(self, follow: Follow) -> None:
        """Request masks."""
        self._pending.append(follow)
        try:
            self.process.send(messages.pack(msgspec.msgpack.encode(follow)))
        except OSError:
            self._fail(_TOO_LARGE)

    def waits_for(self, choice: int) -> bool:
        return any(follow.choice == choice for follow in self._pending)

    def read(self, seconds: float) -> bool:
        """Receive the next reply within `seconds`; returns whether it, or a failure, arrived."""
        if not self._pending:
            return False
        try:
            message = self.process.receive(seconds)
            if message is None:
                return False
            reply = msgspec.msgpack.decode(message[0], type=Masks)
        except (OSError, EOFError, msgspec.DecodeError):
            self._fail(_TOO_LARGE)
            return True
        follow = self._pending.popleft()
        self.replies[follow.choice].append((follow, reply))
        self._seconds_left -= max(reply.cpu_seconds - _FREE_SECONDS * len(reply.masks), 0.0)
        if self._seconds_left < 0:
            self._fail(_TOO_SLOW)
        return True

    def close_one(self) -> None:
        """Close one answer; the last one ends the process."""
        self._num_open -= 1
        if self._num_open == 0:
            if self._pending:
                self.process.kill()
            self.process.close()
            self._pending.clear()

    def _fail(self, fault: str) -> None:
        self.fault = self.fault or fault
        self.process.kill()
        self._pending.clear()


class RemoteMatcher:
    """The `AnswerMatcher` of one answer. End tokens are allowed where the grammar may end."""

    can_look_ahead = True

    def __init__(
        self,
        answers: AnswerProcess,
        choice: int,
        constraint: Constraint,
        first_mask: NDArray[np.bool_],
    ) -> None:
        self._answers = answers
        self._choice = choice
        self._constraint = constraint
        self._allowed = first_mask
        self._is_closed = False
        self._ahead: list[NDArray[np.bool_]] = []
        self.forced: tuple[int, ...] = ()
        self.error: RequestError | None = None
        """The reason why the answer can't go on, if any."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens; `allowed` is valid once `wait` returns true."""
        if self.error is None and token_ids:
            self._answers.ask(Follow(self._choice, token_ids, are_drafts=False))

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Request the masks after each of these draft tokens: see `draft_masks`."""
        self._take_replies()
        self._ahead = []
        if self.error is None and token_ids:
            self._answers.ask(Follow(self._choice, token_ids, are_drafts=True))

    def wait(self, seconds: float) -> bool:
        """Whether `allowed` and `draft_masks` are known, within `seconds`."""
        answers, deadline = self._answers, time.monotonic() + seconds
        while answers.waits_for(self._choice):
            seconds_left = deadline - time.monotonic()
            if not answers.read(max(seconds_left, 0.0)) and seconds_left <= 0:
                return False
        self._take_replies()
        return True

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,) bool: allowed next tokens; none if the answer can't go on."""
        self._take_replies()
        if self._answers.fault:
            self.error = self._constraint.refusal(self._answers.fault)
            self._allowed = np.zeros_like(self._allowed)
        return self._allowed

    def draft_masks(self) -> Sequence[NDArray[np.bool_]]:
        """(vocabulary,) bool after each token of `look_ahead`, while those are allowed."""
        self._take_replies()
        return self._ahead

    def _take_replies(self) -> None:
        for follow, reply in self._answers.replies.pop(self._choice, ()):
            masks = [unpack(mask, len(self._allowed)) for mask in reply.masks if mask]
            if follow.are_drafts:
                self._ahead += masks
                continue
            self._ahead, self.forced = [], reply.forced
            self._allowed = masks[0] if masks else np.zeros_like(self._allowed)
            if not self._allowed.any():
                self.error = self._constraint.refusal(_TOO_COMPLEX)

    def lower_priority(self) -> None:
        """Lower the priority of the process, whose masks come late."""
        self._answers.process.be_nice(_LATE_NICENESS)

    def close(self) -> None:
        """Stop following the answer. Closing twice is no error."""
        if not self._is_closed:
            self._is_closed = True
            self._answers.close_one()


def unpack(mask: bytes, vocabulary_size: int) -> NDArray[np.bool_]:
    """(vocabulary,) bool: the bits of `mask`."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return bits[:vocabulary_size].view(np.bool_)
