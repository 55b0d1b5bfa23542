"""The messages that the engine's loop gets, from any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from vlm_server.cache.caches import EncodedImage
from vlm_server.cache.disk.tier import DiskReadResult
from vlm_server.errors import RequestError
from vlm_server.interfaces import EncodeWork, Prepared
from vlm_server.protocol import Abort, ClearCaches, Drain, SetMemoryLimit, Submit


@dataclass(frozen=True, slots=True)
class PrepareDone:
    """A preparer thread is done with a request."""

    request_id: str
    outcome: Prepared | RequestError


@dataclass(frozen=True, slots=True)
class EncodeDone:
    """The encoder is done with `works`, which it got together.

    seconds: how long they took; infinite if that failed (several were then encoded each alone).
    None if it is no measure: sequences decoded between its parts.
    """

    works: Sequence[EncodeWork]
    outcomes: Sequence[EncodedImage | RequestError]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class DiskReadDone:
    """The disk reader is done with a request."""

    request_id: str
    result: DiskReadResult


FrontCommand = Submit | Abort | Drain | SetMemoryLimit | ClearCaches
"""A message of the front."""
InboxMessage = FrontCommand | PrepareDone | DiskReadDone | EncodeDone
Inbox = SimpleQueue[InboxMessage]
