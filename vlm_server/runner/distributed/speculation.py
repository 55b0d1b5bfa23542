"""Speculation of several ranks: rank 0 chooses drafts by its measured times, and sends them.

There is one message for each decode step that might verify drafts, so that all ranks take the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlm_server.runner.decode.sequence import DecodingSequence
from vlm_server.runner.decode.speculation import DraftByHead, DraftChoice, Speculation
from vlm_server.runner.distributed.messages import Drafts


class RankZeroSpeculation(Speculation):
    """The speculation of rank 0, which sends its choices."""

    def __init__(self, own: Speculation, send: Callable[[Drafts], None]) -> None:
        super().__init__(own.widths, needs_even_rows=own.needs_even_rows)
        self._send = send

    def can_gain(self, seqs: Sequence[DecodingSequence]) -> bool:
        can_gain = super().can_gain(seqs)
        if self.widths and not can_gain:
            self._send(Drafts())
        return can_gain

    def drafts(
        self,
        seqs: Sequence[DecodingSequence],
        eos_token_ids: frozenset[int],
        draft_by_head: DraftByHead | None = None,
    ) -> DraftChoice | None:
        choice = super().drafts(seqs, eos_token_ids, draft_by_head)
        drafts = Drafts()
        if choice is not None:
            drafts = Drafts(choice.width, tuple(map(tuple, choice.token_ids)))
        self._send(drafts)
        return choice


class FollowerSpeculation(Speculation):
    """The speculation of another rank, which receives rank 0's choices."""

    def __init__(self, own: Speculation, receive: Callable[[], Drafts]) -> None:
        super().__init__(needs_even_rows=own.needs_even_rows)
        self._is_asked = bool(own.widths)
        self._receive = receive
        self._received = Drafts()

    def can_gain(self, seqs: Sequence[DecodingSequence]) -> bool:
        if not self._is_asked:
            return False
        self._received = self._receive()
        return self._received.width > 1

    def drafts(
        self,
        seqs: Sequence[DecodingSequence],
        eos_token_ids: frozenset[int],
        draft_by_head: DraftByHead | None = None,
    ) -> DraftChoice | None:
        token_ids = list(map(list, self._received.token_ids))
        return DraftChoice(self._received.width, token_ids, [False] * len(seqs))
