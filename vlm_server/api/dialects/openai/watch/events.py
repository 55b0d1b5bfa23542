"""The events of a watch, as JSON on the wire."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import msgspec

from vlm_server.api.dialects.openai.watch.frame_queue import Counts, Stamp
from vlm_server.api.dialects.openai.watch.reading import Reading
from vlm_server.api.http.streams import sse
from vlm_server.errors import RequestError

EndReason = Literal["deleted", "idle", "body_ended", "shutdown", "failed"]


def started(watch_id: str, model: str) -> bytes:
    return _event("started", watch_id=watch_id, model=model)


def answered(
    frame: Stamp, reading: Reading, previous: tuple[Stamp, Reading] | None, skipped: int
) -> bytes:
    """A new answer; `skipped` frames since the last one were not asked about: newer ones came."""
    before = None if previous is None else _answer(*previous)
    return _event("answer", **_answer(frame, reading), previous=before, skipped=skipped)


def noticed(code: str, message: str, frame: Stamp | None = None) -> bytes:
    """Something that does not end the watch."""
    number = {} if frame is None else {"frame": frame}
    return _event("notice", code=code, message=message, **number)


def ended(watch_id: str, reason: EndReason, error: RequestError | None, counts: Counts) -> bytes:
    """The last event."""
    told = None if error is None else {"code": error.code, "message": error.message}
    return _event("end", watch_id=watch_id, reason=reason, error=told, frames=asdict(counts))


def _answer(frame: Stamp, reading: Reading) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "frame": frame,
        "answer": reading.answer,
        "probability": reading.probability,
    }
    if reading.finish_reason is not None:
        answer["finish_reason"] = reading.finish_reason
    return answer


def _event(name: str, **fields: Any) -> bytes:
    return sse.event(msgspec.json.encode({"type": name, **fields}), name)
