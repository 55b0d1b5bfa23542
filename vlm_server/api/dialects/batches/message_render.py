"""The JSON of Message Batches and of their results, in Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from vlm_server.api.batches.batch import Batch
from vlm_server.api.batches.finish import CANCELLED, EXPIRED
from vlm_server.api.dialects.pages import Json

_ENDS = {EXPIRED: "expired", CANCELLED: "canceled"}


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    """A line of an output or error file."""

    custom_id: str
    response: _Response | None
    error: _Error | None


_decoder = msgspec.json.Decoder(_Line)


def batch_object(batch: Batch, paused: str | None) -> Json:
    """Anthropic's object of a batch, and `paused`: why no request of it is begun."""
    num_done = batch.completed + batch.failed + batch.unfinished
    is_cancelled = batch.status in ("cancelling", "cancelled")
    status = "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status if batch.is_active else "ended",
        "request_counts": {
            "processing": batch.total - num_done if batch.is_active else 0,
            "succeeded": batch.completed,
            "errored": batch.total if batch.status == "failed" else batch.failed,
            "canceled": batch.unfinished if is_cancelled else 0,
            "expired": 0 if is_cancelled else batch.unfinished,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "cancel_initiated_at": _time(batch.cancelling_at),
        "ended_at": None if batch.is_active else _time(batch.ended_at),
        "archived_at": None,
        "results_url": None if batch.is_active else f"/v1/messages/batches/{batch.id}/results",
        "paused": paused,
    }


def results(lines: Sequence[bytes]) -> bytes:
    """Lines of an output or error file as those of Anthropic's results."""
    encode = msgspec.json.encode
    return b"".join(encode(_result(_decoder.decode(line))) + b"\n" for line in lines)


def _result(line: _Line) -> Json:
    result: Json
    if line.response is not None and line.response.status_code == 200:
        result = {"type": "succeeded", "message": line.response.body}
    elif line.response is not None:
        result = {"type": "errored", "error": line.response.body}
    else:
        assert line.error is not None
        error = {"type": "api_error", "message": line.error.message}
        result = {"type": "errored", "error": {"type": "error", "error": error}}
        if line.error.code in _ENDS:
            result = {"type": _ENDS[line.error.code]}
    return {"custom_id": line.custom_id, "result": result}


def _time(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
