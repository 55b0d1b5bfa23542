"""The states of a request and the legal moves between them. Knows nothing else."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    WAITING = "waiting"
    PREPARING = "preparing"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED_ANSWERED = "finished_answered"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_FAILED = "finished_failed"

    @property
    def is_finished(self) -> bool:
        return not TRANSITIONS[self]


_ENDS_EARLY = frozenset({State.FINISHED_ABORTED, State.FINISHED_FAILED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: _ENDS_EARLY | {State.PREPARING},
    State.PREPARING: _ENDS_EARLY | {State.PREFILL},
    State.PREFILL: _ENDS_EARLY | {State.DECODE},
    State.DECODE: _ENDS_EARLY | {State.FINISHED_ANSWERED},
    State.FINISHED_ANSWERED: frozenset(),
    State.FINISHED_ABORTED: frozenset(),
    State.FINISHED_FAILED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A move that `TRANSITIONS` does not list: a bug in the scheduler."""


def check_transition(old: State, new: State) -> None:
    """Raises IllegalTransition unless a request may move from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"{old.name} -> {new.name}")
