"""A batch's record, and the states it goes through."""

from __future__ import annotations

import secrets
import time
from typing import Literal

import msgspec

from vlm_server.api.files import index

Status = Literal[
    "validating", "in_progress", "finalizing", "cancelling", "failed", "completed", "expired",
    "cancelled",
]  # fmt: skip
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
"""The states of a batch that has not ended."""
Counted = Literal["completed", "failed", "unfinished"]
"""The results of lines; `unfinished` have none but that the batch ended before."""
MESSAGES = "msgbatch_"
"""Begins the ids of Message Batches (Anthropic's); those of others begin with `batch_`."""


class Batch(msgspec.Struct, frozen=True):
    """A batch of `owner`; times are in whole seconds since 1970."""

    id: str
    owner: str
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: str
    """JSON of an object, or of null."""
    created_at: int
    expires_at: int
    output_file_id: str
    error_file_id: str
    """The names that these files get once they are written."""
    status: Status = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    is_expired: bool = False
    total: int = 0
    completed: int = 0
    failed: int = 0
    unfinished: int = 0
    num_bytes: int = 0
    """Of the results."""
    fault: str = ""
    """JSON of the errors for which it failed."""

    @property
    def is_messages(self) -> bool:
        """Whether it is a Message Batch."""
        return self.id.startswith(MESSAGES)

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE

    @property
    def outcome(self) -> Status:
        """The state in which it ends, once its files are written."""
        if self.status == "cancelling":
            return "cancelled"
        return "expired" if self.is_expired else "completed"


def new_batch(
    owner: str,
    batch_id: str,
    input_file_id: str,
    endpoint: str,
    *,
    hours: int,
    window: str,
    metadata: object = None,
    total: int = 0,
) -> Batch:
    """A batch that begins now. window: its `hours`, as the client has said them."""
    now = int(time.time())
    return Batch(
        batch_id,
        owner,
        input_file_id,
        endpoint,
        window,
        msgspec.json.encode(metadata).decode(),
        now,
        now + hours * 3600,
        index.new_id(),
        index.new_id(),
        total=total,
    )


def new_id(kind: str) -> str:
    """An id that nothing else has; `kind` is its beginning."""
    return f"{kind}{secrets.token_hex(12)}"
