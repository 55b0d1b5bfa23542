"""The states of a decode batch between two calls, and the calls that are legal in each."""

from __future__ import annotations

import enum


class BatchState(enum.Enum):
    """The state of a batch between two calls."""

    IDLE = "idle"
    """No step is under way: sequences may join, and single ones be removed."""
    FORWARDED = "forwarded"
    """The model runs on the newest tokens, which are unread. Requests may be detached."""
    SAMPLED = "sampled"
    """The next tokens are sampled, and those before them not read yet."""
    WAITING = "waiting"
    """A detached batch: the model ran on the newest tokens, which are read; masks are awaited."""


NEXT_STATE = {
    (BatchState.IDLE, "forward"): BatchState.FORWARDED,
    (BatchState.FORWARDED, "sample"): BatchState.SAMPLED,
    (BatchState.SAMPLED, "result"): BatchState.IDLE,
    (BatchState.FORWARDED, "result"): BatchState.WAITING,
    (BatchState.WAITING, "sample"): BatchState.IDLE,
}
"""The legal calls. The main batch cycles through the first three; a detached batch cycles through
the last two."""
