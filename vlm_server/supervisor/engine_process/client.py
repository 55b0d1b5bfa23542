"""The front's view of models and engines: status, and one stream of events per request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from vlm_server.hub.messages import Progress
from vlm_server.protocol import (
    Accepted,
    Deadlines,
    EncodedSubmit,
    Failed,
    Finished,
    ModelFacts,
    OnDevice,
    Stats,
    Tokens,
)
from vlm_server.supervisor.engine_process.history import EngineEnd, MemorySample
from vlm_server.supervisor.shape import RequestShape

RequestEvent = Accepted | OnDevice | Tokens | Finished | Failed


_UNKNOWN = ModelFacts()


class EngineRequest(msgspec.Struct, frozen=True):
    """A request on its way to the engine, encoded once."""

    submit: EncodedSubmit
    shape: RequestShape
    """The size by which the quarantine knows the request."""

    def to_engine(self, deadlines: Deadlines, adapter: str) -> EngineRequest:
        """The same request with these deadlines, for this adapter or the model itself (empty)."""
        submit = msgspec.structs.replace(self.submit, deadlines=deadlines, adapter=adapter)
        return EngineRequest(submit, self.shape)


EngineState = Literal[
    "stopped",
    "downloading",
    "starting",
    "ready",
    "unresponsive",
    "restarting",
    "failed",
    "stopping",
    "unloaded",
    "waiting",
    "unloading",
]
"""`unresponsive`: silent for half of the time after which it is ended. The last three are states of
a model that is loaded on demand; `waiting`: for its turn, or for memory."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of a model and its engine process."""

    state: EngineState
    model_name: str
    pid: int | None = None
    restarts: int = 0
    progress: tuple[str, float] | None = None
    """Stage and fraction, while the model loads."""
    download: Progress | None = None
    """Details, while the checkpoint is downloaded."""
    retry_after_seconds: float = 1.0
    stats: Stats | None = None
    quarantined_shapes: int = 0
    """Number of request sizes that are refused because engines crashed on them."""
    quarantine_refusals: int = 0
    """Number of requests refused for that."""
    model_facts: ModelFacts = _UNKNOWN
    """The facts of the last engine that was ready."""
    memory_samples: Sequence[MemorySample] = ()
    """Samples of the last hour, the oldest first."""
    ends: tuple[EngineEnd, ...] = ()
    """The last engines that ended by themselves, the oldest first."""
    error: str = ""
    """The reason why the last load failed, for operators."""
    expires_at: float | None = None
    """The time at which an unused model is unloaded, in seconds since 1970."""
    is_kept: bool = False
    """Whether it stays loaded until it is unloaded, though it is not pinned."""
    base: str | None = None
    """The model of an adapter, whose engine answers for it. `stats` are of the base's status."""
    adapter: str = ""
    """The folder of an adapter."""

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def of_adapter(self, name: str, folder: str) -> EngineStatus:
        """The status of an adapter of this model: without what is measured once for both."""
        return EngineStatus(
            self.state,
            name,
            progress=self.progress,
            download=self.download,
            retry_after_seconds=self.retry_after_seconds,
            model_facts=self.model_facts,
            error=self.error,
            expires_at=self.expires_at,
            base=self.model_name,
            adapter=folder,
        )


class EngineClient(Protocol):
    """Sends requests to the engine process, across its restarts."""

    @property
    def status(self) -> EngineStatus: ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[RequestEvent, None]:
        """All events of one request in order; the last one is `Finished` or `Failed`.

        Each `Tokens` event holds one delta, of this request. `OnDevice` comes before the first
        one, when the device begins with the request, and may come again. Closing the iterator early
        (`aclose`) aborts the request in the engine. If the engine dies while the request is in
        flight, the last event is `Failed(code="engine_died")`.

        Raises EngineUnavailable if the engine is not ready, and RequestTooCostly if engines
        crashed on requests of this size; in both cases nothing was sent.
        """
        ...

    def cancel(self, request_id: str) -> bool:
        """End the stream of a request with `Failed(code="request_cancelled")`.

        False if there is none: it has ended, or has not begun.
        """
        ...


class ModelClient(Protocol):
    """The models that are served, by name; the first one is the default.

    Their LoRA adapters, too: what is done to one is done to its base.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def aliases(self, name: str) -> tuple[str, ...]:
        """More names, or patterns of such, that a model's own table has."""
        ...

    def base(self, name: str) -> str | None:
        """The model whose engine answers for the adapter `name`; None for a model."""
        ...

    def is_pinned(self, name: str) -> bool:
        """Whether a model is loaded at the start, and stays."""
        ...

    def status(self, name: str) -> EngineStatus: ...

    def check_ready(self) -> None:
        """Raises EngineUnavailable if no model can take requests."""
        ...

    def lease(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> AbstractAsyncContextManager[EngineClient]:
        """The engine of a model, which stays loaded for the `with` block.

        Loads it first, if needed, which may take minutes. Afterwards it is unloaded after
        `keep_alive_seconds` without a request (negative is never; None keeps the last value).
        Raises EngineUnavailable if it can't be loaded, or if it is pinned and not there;
        ModelDoesNotFit if there is no memory for it; RequestCancelled.
        """
        ...

    async def touch(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> None:
        """`lease` a model for a moment; for 0 seconds: unload it as soon as it is unused."""
        ...

    def cancel(self, request_id: str) -> bool:
        """`EngineClient.cancel`, also of a request that waits for its model."""
        ...

    async def load(self, name: str) -> None:
        """Load a model that is not loaded. Raises what `lease` does, and QueueTimeout."""
        ...

    async def unload(self, name: str) -> None:
        """Unload a loaded model once it is unused. Raises Conflict if it is pinned."""
        ...

    def clear_caches(self, name: str) -> None:
        """Drop unused cache entries of a model. Raises EngineUnavailable if it is not loaded."""
        ...

    def add(self, name: str) -> str:
        """Serve one more checkpoint of this machine; returns its name in the API.

        Raises ModelNotFound if there is none of that name.
        """
        ...
