"""The states of a request, the legal moves between them, and the times of its phases."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from vlm_server.protocol import Phase, PhaseName, Timeline


class State(Enum):
    """The state of a request. The values are the names in `/v1/status` and `/metrics`."""

    WAITING = "waiting"
    """Waits for a preparer."""
    PREPARING = "preparing"
    """A preparer thread tokenizes it, and decodes its media."""
    WAITING_FOR_MEMORY = "waiting_for_memory"
    """Prepared, and not admitted yet."""
    READING_DISK = "reading_disk"
    """Admitted; its disk read waits or is under way."""
    ENCODING = "encoding"
    """Admitted; some of its media are not encoded yet."""
    PREFILL = "prefill"
    """All its media are encoded; its prefill waits or is under way."""
    DECODE = "decode"
    FINISHED_ANSWERED = "finished_answered"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_FAILED = "finished_failed"

    @property
    def is_finished(self) -> bool:
        return not TRANSITIONS[self]

    @property
    def is_admitted(self) -> bool:
        """Whether it may hold device memory."""
        return self in _ADMITTED

    @property
    def waits_for_first_token(self) -> bool:
        """Whether its first token is still to come, and it does not wait for memory."""
        return self in _BEFORE_FIRST_TOKEN


_ADMITTED = frozenset({State.READING_DISK, State.ENCODING, State.PREFILL, State.DECODE})
_BEFORE_FIRST_TOKEN = frozenset(
    {State.WAITING, State.PREPARING, State.READING_DISK, State.ENCODING, State.PREFILL}
)
_ENDS_EARLY = frozenset({State.FINISHED_ABORTED, State.FINISHED_FAILED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: _ENDS_EARLY | {State.PREPARING},
    State.PREPARING: _ENDS_EARLY | {State.WAITING_FOR_MEMORY, State.FINISHED_ANSWERED},
    State.WAITING_FOR_MEMORY: _ENDS_EARLY
    | {State.WAITING, State.READING_DISK, State.ENCODING, State.PREFILL},
    State.READING_DISK: _ENDS_EARLY | {State.WAITING, State.ENCODING, State.PREFILL},
    State.ENCODING: _ENDS_EARLY | {State.PREFILL},
    State.PREFILL: _ENDS_EARLY | {State.WAITING, State.DECODE, State.FINISHED_ANSWERED},
    State.DECODE: _ENDS_EARLY | {State.FINISHED_ANSWERED},
    State.FINISHED_ANSWERED: frozenset(),
    State.FINISHED_ABORTED: frozenset(),
    State.FINISHED_FAILED: frozenset(),
}

LIVE = tuple(state for state in State if TRANSITIONS[state])


class IllegalTransition(RuntimeError):
    """A move that `TRANSITIONS` does not list: a bug in the scheduler."""


def check_transition(old: State, new: State) -> None:
    """Raises IllegalTransition unless a request may move from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"{old.name} -> {new.name}")


_PHASES: dict[State, PhaseName] = {
    State.PREPARING: "prepare",
    State.READING_DISK: "disk_read",
    State.ENCODING: "encode",
    State.PREFILL: "prefill",
    State.DECODE: "decode",
}
_DEVICE_STATES = frozenset({State.READING_DISK, State.ENCODING, State.PREFILL})


class Stopwatch:
    """Times of the phases of a request; each begins where the one before it ends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds, never backwards."""
        self.began_at = self._since = clock()
        self._clock = clock
        self._phase: PhaseName = "queue"
        self._phases: list[Phase] = []

    def enter(self, state: State, *, has_left_queue: bool) -> None:
        """Enter the phase of `state`; a final state extends the last phase.

        The phase is `queue` until the device begins with the request.
        """
        if state.is_finished:
            return
        is_queued = state in _DEVICE_STATES and not has_left_queue
        phase = "queue" if is_queued else _PHASES.get(state, "queue")
        if phase != self._phase:
            now = self._clock()
            self._phases.append(Phase(self._phase, now - self._since))
            self._phase, self._since = phase, now

    def timeline(self) -> Timeline:
        """All phases so far; the last one ends now."""
        last_phase = Phase(self._phase, self._clock() - self._since)
        return Timeline(self.began_at, (*self._phases, last_phase))
