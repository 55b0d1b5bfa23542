"""What the front sees of an engine process. Knows the protocol; knows no process, no HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from vlm_server.protocol import Accepted, Failed, Finished, Stats, Submit, Tokens

RequestEvent = Accepted | Tokens | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the front knows of the engine process. `progress` is (stage, fraction) while loading.

    `quarantined_shapes` are the sizes of requests that engines died of, and that are refused for
    now; `quarantine_refusals` is how many requests were.
    """

    state: str
    model_name: str
    pid: int | None = None
    restarts: int = 0
    progress: tuple[str, float] | None = None
    retry_after_seconds: float = 1.0
    stats: Stats | None = None
    quarantined_shapes: int = 0
    quarantine_refusals: int = 0

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


class EngineClient(Protocol):
    """The front's view of an engine process, whichever incarnation of it runs."""

    @property
    def status(self) -> EngineStatus: ...

    def stream(self, submit: Submit) -> AsyncGenerator[RequestEvent, None]:
        """All events of one request, in order, the last of them terminal.

        `Tokens` events hold this request's delta alone. Closing the iterator early
        (`aclose`) aborts the request in the engine. Never raises RequestError while the
        engine lives; raises EngineUnavailable before anything was sent if it isn't ready, or
        RequestTooCostly if engines died of requests of this size,
        and yields `Failed(code="engine_died")` if it dies while the request is in flight.
        """
        ...
