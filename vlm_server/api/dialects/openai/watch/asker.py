"""Asks an engine a watch's question about frames, as a request of its own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing

import anyio.to_thread
import msgspec
from starlette.types import Scope

from vlm_server.api.dialects.openai.watch.frame_queue import Frame
from vlm_server.api.dialects.openai.watch.reading import Reading, read
from vlm_server.api.dialects.openai.watch.schema import WatchPlan
from vlm_server.api.http import access_log
from vlm_server.api.http.access import keys
from vlm_server.api.http.answer import answer, collect_answer
from vlm_server.api.http.deadlines import RequestClock
from vlm_server.api.http.generation import Generation, engine_events
from vlm_server.api.http.model_metrics import ModelMetrics
from vlm_server.api.http.recorder import AnswerRecorder
from vlm_server.api.parsing.parsed_request import ParsedRequest, encode_request
from vlm_server.protocol import Image, ImagePart, Submit

_ON_DEVICE = ("encode", "prefill", "decode")


class Asker:
    """Asks questions; `device_seconds` is the time that they took on the device, in all."""

    def __init__(self, shared: Generation) -> None:
        self._shared = shared
        self.device_seconds = 0.0

    def others_wait(self) -> bool:
        """Whether requests of clients wait for a device: those of watches are not counted."""
        return any(metrics.num_waiting > 0 for metrics in self._shared.metrics.values())

    async def ask(self, plan: WatchPlan, frames: Sequence[Frame], scope: Scope) -> Reading:
        """The answer about `frames`, the newest last; the watch is that of `scope`.

        Raises RequestError.
        """
        shared, request_id = self._shared, f"watch-{uuid.uuid4().hex}"
        submit = submit_of(plan, frames, request_id)
        parsed = ParsedRequest(plan.model, submit, stream=False)
        request, _ = await anyio.to_thread.run_sync(encode_request, parsed)
        num_bytes = sum(len(frame.data) for frame in frames)
        with shared.queue_slots.hold(keys.key_of(scope).name, num_bytes) as slot:
            recorder = AnswerRecorder(
                ModelMetrics(), plan.model, request_id, time.monotonic(), is_stream=False
            )
            entry = access_log.entry_of(scope)
            entry.answer = recorder
            shared.in_flight[request_id] = scope

            def begin() -> None:
                slot.release_body()
                recorder.begin()

            clock = RequestClock({}, shared.settings.deadlines)
            events = clock.watch(engine_events(shared, request, plan.model, clock, entry), begin)
            try:
                with recorder:
                    async with aclosing(answer(events, recorder)) as deltas:
                        (choice,), finished = await collect_answer(deltas, 1, recorder)
            finally:
                del shared.in_flight[request_id]
                seconds = recorder.phase_seconds()
                self.device_seconds += sum(seconds.get(phase, 0.0) for phase in _ON_DEVICE)
        return read(plan, choice, finished)


def submit_of(plan: WatchPlan, frames: Sequence[Frame], request_id: str) -> Submit:
    """The engine's request: `frames`, in their order, stand before the text of the question.

    What is the same every time and long belongs before them, into `instructions`.
    """
    *before, last = plan.submit.messages
    parts = tuple(ImagePart(i) for i in range(len(frames)))
    message = msgspec.structs.replace(last, content=(*parts, *last.content))
    return msgspec.structs.replace(
        plan.submit,
        request_id=request_id,
        messages=(*before, message),
        images=tuple(_image(frame, plan) for frame in frames),
    )


def _image(frame: Frame, plan: WatchPlan) -> Image:
    facts = frame.facts
    return Image(
        data=frame.data,
        content_hash=facts.content_hash,
        format=facts.format,
        width=facts.width,
        height=facts.height,
        param=f"frame {frame.stamp.number}",
        min_pixels=plan.min_pixels,
        max_pixels=plan.max_pixels,
    )
