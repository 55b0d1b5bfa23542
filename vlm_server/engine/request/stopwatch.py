"""How long a request spends in each phase of its life in the engine."""

from __future__ import annotations

from collections.abc import Callable

from vlm_server.engine.request.states import State
from vlm_server.protocol import Phase, PhaseName, Timeline

_PHASES: dict[State, PhaseName] = {
    State.PREPARING: "prepare",
    State.LOADING: "load",
    State.ENCODING: "encode",
    State.PREFILL: "prefill",
    State.DECODE: "decode",
}
_OF_THE_DEVICE = frozenset({State.LOADING, State.ENCODING, State.PREFILL})


class Stopwatch:
    """Runs from when it is made; each phase begins where the one before it ends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds, never backwards."""
        self.began_at = self._since = clock()
        self._clock = clock
        self._phase: PhaseName = "queue"
        self._phases: list[Phase] = []

    def enter(self, state: State, *, has_left_queue: bool) -> None:
        """A request is in `state` from now on. One that has ended stays in its last phase.

        It is in the queue, whatever its state, until the device begins with it.
        """
        if state.is_finished:
            return
        waits = state in _OF_THE_DEVICE and not has_left_queue
        phase = "queue" if waits else _PHASES.get(state, "queue")
        if phase != self._phase:
            now = self._clock()
            self._phases.append(Phase(self._phase, now - self._since))
            self._phase, self._since = phase, now

    def read(self) -> Timeline:
        """All phases so far; the last one ends now."""
        last = Phase(self._phase, self._clock() - self._since)
        return Timeline(self.began_at, (*self._phases, last))
