"""What harnesses of the engine's loop share that run it on the test's own thread."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from vlm_server.engine.inbox import InboxMessage

_MAX_STEPS = 1000


class ImpatientQueue(SimpleQueue[InboxMessage]):
    """An inbox that raises Empty instead of waiting, as no other thread fills it."""

    def get(self, block: bool = True, timeout: float | None = None) -> InboxMessage:
        return super().get(block=False)


def step_until(step: Callable[[], object], condition: Callable[[], bool]) -> None:
    for _ in range(_MAX_STEPS):
        if condition():
            return
        step()
    raise AssertionError(f"not within {_MAX_STEPS} steps")
