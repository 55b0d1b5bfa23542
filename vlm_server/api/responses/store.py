"""The responses that clients may go on from, look at and delete: bounded in bytes and time.

Each belongs to one client; for all others it does not exist. Knows bytes, and nothing of items.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vlm_server.errors import NotFound, PreviousResponseNotFound
from vlm_server.settings import Server

OVERHEAD_BYTES = 1024
"""What an entry counts beside its bytes."""


@dataclass(slots=True, eq=False)
class _Turn:
    """The items of a request and of its response, and the turn before.

    It is kept while `num_holders` responses and later turns need it.
    """

    items: bytes
    parent: _Turn | None
    output: bytes = b""
    num_holders: int = 1

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.output) + OVERHEAD_BYTES

    def upwards(self) -> Iterator[_Turn]:
        """This one, and all before it."""
        turn: _Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


@dataclass(slots=True)
class _Entry:
    client: str
    response: bytes
    turn: _Turn
    expires: float
    is_pending: bool = True


class ResponseStore:
    """Responses by their ids. `clock` counts seconds.

    A deleted response is forgotten, in later turns that go on from it too. One that is dropped for
    its age, or for want of room, lives on in those.
    """

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = server.responses_store_bytes
        self._seconds = server.responses_store_seconds
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Of everything that is kept."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._entries)

    # ---- while a response is made ------------------------------------------------------

    def begin(
        self, response_id: str, client: str, previous_id: str | None, items: bytes, response: bytes
    ) -> bool:
        """Keep the `items` of a request, and `response` as it stands now.

        Returns whether they are kept: they are not if they are too large together with the turns
        before them, or if those have gone.
        """
        self._drop_expired()
        previous = self._entries.get(previous_id) if previous_id is not None else None
        if previous_id is not None and (previous is None or previous.client != client):
            return False
        turn = _Turn(items, previous.turn if previous else None)
        if not self._has_room_for(turn, response):
            return False
        if turn.parent is not None:
            turn.parent.num_holders += 1
        self._entries[response_id] = _Entry(client, response, turn, self._clock() + self._seconds)
        self._size_bytes += turn.size_bytes + len(response)
        self._evict()
        return True

    def finish(self, response_id: str, response: bytes, output: bytes) -> None:
        """Keep the `response` and the items of its `output`, unless it is gone by now."""
        entry = self._entries.get(response_id)
        if entry is None or not entry.is_pending:
            return
        entry.turn.output = output
        self._size_bytes += len(output) + len(response) - len(entry.response)
        entry.response, entry.is_pending = response, False
        entry.expires = self._clock() + self._seconds
        self._entries[response_id] = self._entries.pop(response_id)  # the youngest
        if not self._has_room_for(entry.turn, response):
            self._drop(response_id)
        self._evict()

    def abandon(self, response_id: str) -> None:
        """Forget a response that was not finished; others stay."""
        entry = self._entries.get(response_id)
        if entry is not None and entry.is_pending:
            self._drop(response_id)

    # ---- what clients ask for ----------------------------------------------------------

    def recall(self, client: str, response_id: str) -> tuple[bytes, ...]:
        """The items of all turns up to that response, the oldest first, as JSON lists.

        Raises PreviousResponseNotFound.
        """
        self._drop_expired()
        entry = self._entries.get(response_id)
        if entry is None or entry.client != client or entry.is_pending:
            raise PreviousResponseNotFound(
                "The previous response was not found: it was not stored, or deleted, or dropped "
                "since (`server.responses_store_seconds` and `server.responses_store_bytes`).",
                "previous_response_id",
            )
        return tuple(
            items
            for turn in reversed(list(entry.turn.upwards()))
            for items in (turn.items, turn.output)
            if items
        )

    def response(self, client: str, response_id: str) -> bytes:
        """Its JSON. Raises NotFound."""
        return self._find(client, response_id).response

    def input_items(self, client: str, response_id: str) -> tuple[bytes, ...]:
        """What it was made from, earlier turns included, as JSON lists. Raises NotFound."""
        turn = self._find(client, response_id).turn
        before = list(turn.upwards())[:0:-1]
        earlier = (items for each in before for items in (each.items, each.output))
        return tuple(items for items in (*earlier, turn.items) if items)

    def delete(self, client: str, response_id: str) -> None:
        """Forget it and its items. Raises NotFound."""
        turn = self._find(client, response_id).turn
        self._size_bytes -= len(turn.items) + len(turn.output)
        turn.items = turn.output = b""
        self._drop(response_id)

    def _find(self, client: str, response_id: str) -> _Entry:
        self._drop_expired()
        entry = self._entries.get(response_id)
        if entry is None or entry.client != client:
            raise NotFound("There is no such response.", "response_id")
        return entry

    # ---- room --------------------------------------------------------------------------

    def _has_room_for(self, turn: _Turn, response: bytes) -> bool:
        """Whether it would fit if nothing else were here."""
        num_bytes = sum(each.size_bytes for each in turn.upwards()) + len(response)
        return num_bytes <= self._max_bytes

    def _evict(self) -> None:
        while self._size_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._entries:
            response_id, entry = next(iter(self._entries.items()))
            if entry.expires > now:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        self._size_bytes -= len(entry.response)
        turn: _Turn | None = entry.turn
        while turn is not None:
            turn.num_holders -= 1
            if turn.num_holders:
                return
            self._size_bytes -= turn.size_bytes
            parent, turn.parent = turn.parent, None
            turn = parent
