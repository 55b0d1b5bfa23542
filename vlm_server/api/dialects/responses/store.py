"""Stored responses, which clients may continue, retrieve and delete: bounded in bytes and time.

Each belongs to one owner and is invisible to other clients. Handles bytes only, not items.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from vlm_server.api.fair_turns import room_of
from vlm_server.errors import NotFound, PreviousResponseNotFound
from vlm_server.settings import Server

OVERHEAD_BYTES = 1024
"""Bytes counted for a turn in addition to its items."""


@dataclass(slots=True, eq=False)
class _Turn:
    """The items of a request and of its response, and the previous turn.

    Kept while `num_references` responses and later turns need it.
    """

    items: bytes
    parent: _Turn | None
    output: bytes = b""
    num_references: int = 1

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.output) + OVERHEAD_BYTES

    def history(self) -> list[_Turn]:
        """All turns up to this one, oldest first."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]


@dataclass(slots=True)
class _Entry:
    response: bytes
    turn: _Turn
    expires: float = math.inf
    is_pending: bool = True
    is_complete: bool = False
    """Whether the turn can be continued: neither pending nor failed."""

    @property
    def needed_bytes(self) -> int:
        """Size of the response and of all turns up to it."""
        return len(self.response) + sum(turn.size_bytes for turn in self.turn.history())


@dataclass(slots=True)
class _OwnerResponses:
    """One owner's responses by id, oldest first, and their turns."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    size_bytes: int = 0

    def finished(self) -> Iterator[tuple[str, _Entry]]:
        """The responses that are not pending, the next to expire first."""
        return (item for item in self.entries.items() if not item[1].is_pending)

    def drop(self, response_id: str) -> None:
        """Remove a response, and the turns that no other response needs."""
        entry = self.entries.pop(response_id)
        self.size_bytes -= len(entry.response)
        for turn in reversed(entry.turn.history()):
            turn.num_references -= 1
            if turn.num_references:
                return
            self.size_bytes -= turn.size_bytes
            turn.parent = None


class ResponseStore:
    """Responses by owner and id. `clock` returns seconds.

    A deleted response disappears from later turns, too; an expired or evicted one stays in them.
    One owner may use all the room until another needs some; then the owner with the most bytes
    loses its oldest response.
    """

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = server.max_responses_bytes
        self.num_evicted = 0
        """The number of responses evicted for lack of room."""
        self._seconds = server.responses_keep_seconds
        self._clock = clock
        self._by_owner: dict[str, _OwnerResponses] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all owners' entries."""
        return sum(owned.size_bytes for owned in self._by_owner.values())

    def __len__(self) -> int:
        return sum(len(owned.entries) for owned in self._by_owner.values())

    # ---- while a response is made ------------------------------------------------------

    def begin(
        self, owner: str, response_id: str, previous_id: str | None, items: bytes, response: bytes
    ) -> bool:
        """Keep the `items` of a request, and `response` in its current state.

        Returns whether they are kept: not if they and earlier turns are too large, nor if an
        earlier turn is gone.
        """
        self.drop_expired()
        previous = self._get(owner, previous_id) if previous_id is not None else None
        if previous_id is not None and previous is None:
            return False
        turn = _Turn(items, previous.turn if previous else None)
        entry = _Entry(response, turn)
        if not self._has_room_for(owner, entry):
            return False
        if turn.parent is not None:
            turn.parent.num_references += 1
        owned = self._by_owner.setdefault(owner, _OwnerResponses())
        owned.entries[response_id] = entry
        owned.size_bytes += turn.size_bytes + len(response)
        self._evict()
        return True

    def update(self, owner: str, response_id: str, response: bytes) -> None:
        """Replace a response that is not finished, if it is still there."""
        entry = self._get(owner, response_id)
        if entry is not None and entry.is_pending:
            self._by_owner[owner].size_bytes += len(response) - len(entry.response)
            entry.response = response
            self._evict()

    def finish(self, owner: str, response_id: str, response: bytes, output: bytes) -> bool:
        """Keep the `response` and the items of its `output`, for later turns to continue.

        Returns whether they are kept: not without room, nor if the response is gone.
        """
        return self._finish(owner, response_id, response, output, is_complete=True)

    def fail(self, owner: str, response_id: str, response: bytes) -> bool:
        """As `finish`, for a failed response, which can't be continued."""
        return self._finish(owner, response_id, response, b"", is_complete=False)

    def _finish(
        self, owner: str, response_id: str, response: bytes, output: bytes, *, is_complete: bool
    ) -> bool:
        entry = self._get(owner, response_id)
        if entry is None or not entry.is_pending:
            return False
        owned = self._by_owner[owner]
        entry.is_complete = is_complete
        owned.size_bytes += len(output) + len(response) - len(entry.response)
        entry.turn.output, entry.response, entry.is_pending = output, response, False
        entry.expires = self._clock() + self._seconds
        owned.entries[response_id] = owned.entries.pop(response_id)  # now the newest
        has_room = self._has_room_for(owner, entry)
        if not has_room:
            self._drop(owner, response_id)
        self._evict()
        return has_room

    def abandon(self, owner: str, response_id: str) -> None:
        """Remove a response that was not finished."""
        entry = self._get(owner, response_id)
        if entry is not None and entry.is_pending:
            self._drop(owner, response_id)

    # ---- retrieval ---------------------------------------------------------------------

    def recall(self, owner: str, response_id: str) -> tuple[bytes, ...]:
        """The items of all turns up to that response, oldest first, as JSON lists.

        Raises PreviousResponseNotFound.
        """
        turn = self._finished_turn(owner, response_id)
        if turn is None:
            raise PreviousResponseNotFound(
                "The previous response was not found: it was not stored, or deleted, or dropped "
                "since (`server.responses_keep_seconds` and `server.max_responses_bytes`).",
                "previous_response_id",
            )
        return _contents(turn.history())

    def turn(self, owner: str, response_id: str) -> tuple[bytes, ...]:
        """The items of that response and of its request, as JSON lists; empty if there is none."""
        turn = self._finished_turn(owner, response_id)
        return _contents([turn]) if turn else ()

    def response(self, owner: str, response_id: str) -> bytes:
        """A response's JSON. Raises NotFound."""
        return self._find(owner, response_id).response

    def input_items(self, owner: str, response_id: str) -> tuple[bytes, ...]:
        """A response's input, earlier turns included, as JSON lists. Raises NotFound."""
        *earlier, turn = self._find(owner, response_id).turn.history()
        return _contents(earlier) + ((turn.items,) if turn.items else ())

    def delete(self, owner: str, response_id: str) -> None:
        """Remove a response and its items. Raises NotFound."""
        turn = self._find(owner, response_id).turn
        self._by_owner[owner].size_bytes -= len(turn.items) + len(turn.output)
        turn.items = turn.output = b""
        self._drop(owner, response_id)

    def _find(self, owner: str, response_id: str) -> _Entry:
        self.drop_expired()
        entry = self._get(owner, response_id)
        if entry is None:
            raise NotFound("There is no such response.", "response_id")
        return entry

    def _finished_turn(self, owner: str, response_id: str) -> _Turn | None:
        self.drop_expired()
        entry = self._get(owner, response_id)
        return entry.turn if entry is not None and entry.is_complete else None

    def _get(self, owner: str, response_id: str) -> _Entry | None:
        owned = self._by_owner.get(owner)
        return owned.entries.get(response_id) if owned else None

    # ---- time --------------------------------------------------------------------------

    def drop_expired(self) -> None:
        """Remove responses that are too old; the time of pending ones has not begun."""
        now = self._clock()
        for owner, owned in list(self._by_owner.items()):
            expired = takewhile(lambda item: item[1].expires <= now, owned.finished())
            for response_id, _ in list(expired):
                self._drop(owner, response_id)

    def seconds_left(self) -> float | None:
        """Seconds until the next response expires; None if none does."""
        oldest = (next(owned.finished(), None) for owned in self._by_owner.values())
        expires = min((item[1].expires for item in oldest if item is not None), default=None)
        return None if expires is None else max(0.0, expires - self._clock())

    # ---- room --------------------------------------------------------------------------

    def _has_room_for(self, owner: str, entry: _Entry) -> bool:
        """Whether `entry` fits once the rest of `owner` is evicted: into an equal share, or the
        room left by other owners."""
        sizes = {each: owned.size_bytes for each, owned in self._by_owner.items()}
        return entry.needed_bytes <= room_of(owner, sizes, self.limit_bytes)

    def _evict(self) -> None:
        while self.size_bytes > self.limit_bytes:
            owner = max(self._by_owner, key=lambda each: self._by_owner[each].size_bytes)
            owned = self._by_owner[owner]
            oldest = next(owned.finished(), next(iter(owned.entries.items())))
            self._drop(owner, oldest[0])
            self.num_evicted += 1

    def _drop(self, owner: str, response_id: str) -> None:
        owned = self._by_owner[owner]
        owned.drop(response_id)
        if not owned.entries:
            del self._by_owner[owner]


def _contents(turns: Iterable[_Turn]) -> tuple[bytes, ...]:
    """The items of requests and responses of `turns`, as JSON lists."""
    return tuple(items for turn in turns for items in (turn.items, turn.output) if items)
