"""The messages to the engine's loop, from any thread."""

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
    """The result of preparing a request."""

    request_id: str
    outcome: Prepared | RequestError


@dataclass(frozen=True, slots=True)
class EncodeDone:
    """The result of encoding `encodes` in one call."""

    encodes: Sequence[EncodeWork]
    outcomes: Sequence[EncodedImage | RequestError]
    seconds: float | None
    """The time of the call; infinite if it failed (several were then encoded each alone). None if
    it is no measure, since sequences decoded between its parts."""


@dataclass(frozen=True, slots=True)
class DiskReadDone:
    """The result of a request's disk read."""

    request_id: str
    result: DiskReadResult


FrontCommand = Submit | Abort | Drain | SetMemoryLimit | ClearCaches
"""A message from the front."""
InboxMessage = FrontCommand | PrepareDone | DiskReadDone | EncodeDone
Inbox = SimpleQueue[InboxMessage]
