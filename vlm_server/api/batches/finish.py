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

EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
"""The errors of lines that a batch's end has left without a result."""
_CHUNK = 500


def finish(batch: Batch, batches: BatchStore, files: FileStore) -> None:
    """Write the files of `batch`, and end it. Calling it again after a crash does no harm: the
    files have the names that the batch has given them. Raises StorageFull."""
    now = int(time.time())
    try:
        if batch.completed:
            _write(batch, batch.output_file_id, "output", batches, files)
        if batch.failed or batch.unfinished:
            _write(batch, batch.error_file_id, "errors", batches, files)
    except PayloadTooLarge as error:
        fail(batch, [Fault("output_too_large", error.message)], batches)
        return
    batches.end(batch, status=batch.outcome, ended_at=now)
    if batch.is_messages and (file := files.find(batch.owner, batch.input_file_id)):
        files.delete(file)  # its client has not uploaded it


def fail(batch: Batch, faults: list[Fault], batches: BatchStore) -> None:
    """End `batch` with these errors, and without files."""
    fault = msgspec.json.encode(faults).decode()
    counts = dict.fromkeys(("completed", "failed", "unfinished"), 0)
    batches.end(batch, status="failed", ended_at=int(time.time()), fault=fault, **counts)


def record_unfinished(batch: Batch, lines: LineFile, batches: BatchStore) -> None:
    """Record an error for each line without a result. Call it from a thread."""
    code, text = CANCELLED, "The batch was cancelled before this request was executed."
    if batch.is_expired:
        code = EXPIRED
        text = "This request could not be executed before the completion window expired."
    done = batches.done_lines(batch)
    missing = [index for index in range(len(lines)) if index not in done]
    for start in range(0, len(missing), _CHUNK):
        results = list[tuple[int, Counted, bytes]]()
        for index in missing[start : start + _CHUNK]:
            data = failure(lines.read(index).custom_id, code, text)
            results.append((index, "unfinished", data))
        batches.add_results(batch, results)


def _write(batch: Batch, file_id: str, name: str, batches: BatchStore, files: FileStore) -> None:
    with files.upload() as upload:
        for data in batches.results(batch, completed=name == "output"):
            upload.write(data + b"\n")
        filename = f"{batch.id}_{name}.jsonl"
        files.add(batch.owner, upload, filename, "batch_output", file_id=file_id)
