"""The JSON of a batch."""

from __future__ import annotations

import msgspec

from vlm_server.api.batches.batch import Batch
from vlm_server.api.dialects.pages import Json

_ENDS = ("failed", "completed", "expired", "cancelled")


def batch_object(batch: Batch, paused: str | None) -> Json:
    """OpenAI's object of a batch, and `paused`: why no line of it is begun."""
    failed = batch.failed + batch.unfinished
    has_files = batch.status in ("completed", "expired", "cancelled")
    faults = msgspec.json.decode(batch.fault) if batch.fault else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None if faults is None else {"object": "list", "data": faults},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if has_files and batch.completed else None,
        "error_file_id": batch.error_file_id if has_files and failed else None,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "cancelling_at": batch.cancelling_at,
        **{f"{end}_at": batch.ended_at if batch.status == end else None for end in _ENDS},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": failed,
        },
        "metadata": msgspec.json.decode(batch.metadata),
        "paused": paused,
    }
