"""The end of a batch: its results, written to files that its owner may download."""

from __future__ import annotations

import time

import msgspec

from vlm_server.api.batches.batch import Batch, Counted
from vlm_server.api.batches.lines import Fault, LineFile
from vlm_server.api.batches.run import failure
from vlm_server.api.batches.store import BatchStore
from vlm_server.api.files.store import FileStore
from vlm_server.errors import PayloadTooLarge

_CHUNK = 500


def finish(batch: Batch, batches: BatchStore, files: FileStore) -> None:
    """Write the files of `batch`, and end it. Calling it again after a crash does no harm: the
    files have the names that the batch has given them. Raises StorageFull."""
    now = int(time.time())
    try:
        _write(batch, "completed", batch.output_file_id, "output", batches, files)
        _write(batch, "failed", batch.error_file_id, "errors", batches, files)
    except PayloadTooLarge as error:
        fail(batch, [Fault("output_too_large", error.message)], batches)
        return
    batches.end(batch, status=batch.outcome, ended_at=now)


def fail(batch: Batch, faults: list[Fault], batches: BatchStore) -> None:
    """End `batch` with these errors, and without files."""
    fault = msgspec.json.encode(faults).decode()
    batches.end(
        batch, status="failed", ended_at=int(time.time()), fault=fault, completed=0, failed=0
    )


def record_expired(batch: Batch, lines: LineFile, batches: BatchStore) -> None:
    """Record an error for each line without a result. Call it from a thread."""
    text = "This request could not be executed before the completion window expired."
    done = batches.done_lines(batch)
    missing = [index for index in range(len(lines)) if index not in done]
    for start in range(0, len(missing), _CHUNK):
        results = list[tuple[int, Counted, bytes]]()
        for index in missing[start : start + _CHUNK]:
            data = failure(lines.read(index).custom_id, "batch_expired", text)
            results.append((index, "failed", data))
        batches.add_results(batch, results)


def _write(
    batch: Batch, kind: Counted, file_id: str, name: str, batches: BatchStore, files: FileStore
) -> None:
    if not getattr(batch, kind):
        return
    with files.upload() as upload:
        for data in batches.results(batch, kind):
            upload.write(data + b"\n")
        files.add_as(batch.owner, upload, file_id, f"{batch.id}_{name}.jsonl", "batch_output")
