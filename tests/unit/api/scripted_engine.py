"""A fake `EngineClient` that plays a script and runs no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from msgspec import structs

from vlm_server.errors import (
    Conflict,
    EngineUnavailable,
    ModelNotFound,
    RequestCancelled,
    RequestError,
)
from vlm_server.protocol import (
    MESSAGE_HEADER,
    Accepted,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Submit,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Usage,
    decode_command,
    encode_message,
)
from vlm_server.supervisor.engine_process.client import (
    EngineClient,
    EngineRequest,
    EngineStatus,
    RequestEvent,
)

Step = Callable[[str], RequestEvent] | asyncio.Event
"""An event made for a request id, or something to wait for."""


def text(piece: str, choice: int = 0) -> Step:
    return lambda request_id: Tokens((Delta(request_id, piece, choice=choice),))


def scored(piece: str, *entries: TokenLogprob, choice: int = 0) -> Step:
    return lambda request_id: Tokens((Delta(request_id, piece, entries, choice),))


def thinks(piece: str, choice: int = 0) -> Step:
    return lambda request_id: Tokens((Delta(request_id, piece, choice=choice, is_reasoning=True),))


def calls(
    index: int, arguments: str = "", *, id: str = "", name: str = "", choice: int = 0
) -> Step:
    """A tool call delta; the first one of a call has its `id` and `name`."""
    call = ToolCallDelta(index, id, name, arguments)
    return lambda request_id: Tokens((Delta(request_id, "", choice=choice, tool_call=call),))


def ended(reason: FinishReason = "stop", choice: int = 0) -> Step:
    """The last delta of a choice."""
    return lambda request_id: Tokens((Delta(request_id, "", (), choice, reason),))


def ends_with(piece: str) -> Step:
    """The last delta of the only choice, with text."""
    return lambda request_id: Tokens((Delta(request_id, piece, finish_reason="stop"),))


def finished(usage: Usage | None = None, *, is_aborted: bool = False) -> Step:
    return lambda request_id: Finished(request_id, usage or Usage(7, 2, 3), is_aborted)


def failed(code: str, message: str, param: str | None = None) -> Step:
    return lambda request_id: Failed(request_id, code, message, param)


def never() -> Step:
    return asyncio.Event()


HELLO: tuple[Step, ...] = (text("Hello"), text(""), text(" world"), ended(), finished())


def decoded(request: EngineRequest) -> Submit:
    """The `Submit` as the engine decodes it."""
    command = decode_command(encode_message(request.submit)[MESSAGE_HEADER.size :])
    assert isinstance(command, Submit)
    return command


class ScriptedEngine:
    """Plays `script` to each request; records submitted and early closed requests."""

    def __init__(self, *script: Step) -> None:
        self.script = script or HELLO
        self.status = EngineStatus(state="ready", model_name="demo")
        self.submitted: list[Submit] = []
        self.params: list[tuple[str, ...]] = []
        """Where the messages of each came from; they are submitted without."""
        self.aborted: list[str] = []
        self.loses_requests = False
        self.refusal: RequestError | None = None
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()
        self.cancelled: set[str] = set()
        self._open: dict[str, asyncio.Event] = {}

    def be(self, state: str, retry_after_seconds: float = 1.0) -> None:
        self.status = replace(self.status, state=state, retry_after_seconds=retry_after_seconds)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; takes effect where the script waits."""
        if request_id not in self._open:
            return False
        self.cancelled.add(request_id)
        self._open[request_id].set()
        return True

    async def stream(self, request: EngineRequest) -> AsyncGenerator[RequestEvent, None]:
        if self.loses_requests:
            raise EngineUnavailable("The engine is not ready.")
        if self.refusal:
            raise self.refusal
        submit = decoded(request)
        self.params.append(tuple(message.param for message in submit.messages))
        messages = tuple(structs.replace(message, param="") for message in submit.messages)
        self.submitted.append(structs.replace(submit, messages=messages))
        is_over = False
        try:
            yield Accepted(submit.request_id)
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    self._open[submit.request_id] = step
                    self.waiting.set()
                    await step.wait()
                    del self._open[submit.request_id]
                    if submit.request_id in self.cancelled:
                        error = RequestCancelled("The request was cancelled.")
                        yield Failed(submit.request_id, error.code, error.message)
                        return
                    continue
                event = step(submit.request_id)
                yield event
            is_over = True
        finally:
            await asyncio.sleep(0)  # a real engine has a message to send here
            if not is_over:
                self.aborted.append(submit.request_id)
            self.closed.set()


class OneModel:
    """A fake `ModelClient` of one pinned model, served by `engine`."""

    def __init__(self, engine: EngineClient, aliases: tuple[str, ...] = ()) -> None:
        self._engine = engine
        self._aliases = aliases

    @property
    def names(self) -> tuple[str, ...]:
        return (self._engine.status.model_name,)

    def aliases(self, name: str) -> tuple[str, ...]:
        return self._aliases

    def base(self, name: str) -> str | None:
        return None

    def is_pinned(self, name: str) -> bool:
        return True

    def status(self, name: str) -> EngineStatus:
        return self._engine.status

    def check_ready(self) -> None:
        if not self._engine.status.is_ready:
            raise EngineUnavailable(f"The engine is not ready: {self._engine.status.state}.")

    @asynccontextmanager
    async def lease(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> AsyncIterator[EngineClient]:
        yield self._engine

    async def touch(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> None:
        pass

    def cancel(self, request_id: str) -> bool:
        return self._engine.cancel(request_id)

    async def load(self, name: str) -> None:
        pass

    async def unload(self, name: str) -> None:
        raise Conflict(f"The model `{name}` is pinned: it stays loaded.", "model")

    def clear_caches(self, name: str) -> None:
        pass

    def add(self, name: str) -> str:
        raise ModelNotFound(f"There is no model `{name}` on this machine.", "model")
