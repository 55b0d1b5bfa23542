"""Queue slots: bounds on the requests in flight and on the bytes of their waiting bodies."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from vlm_server.errors import QueueFull
from vlm_server.platform import machine
from vlm_server.platform.awake import Awake
from vlm_server.settings import Limits

_FREE_BYTES = 64 << 10
"""Uncounted bytes of each body: no short text is refused because of other clients' images."""
_RETRY_SECONDS = 5.0
"""Time after `Retry-After` for which a refused client's share is kept free."""
_MIN_BODIES = 4
_MEMORY_FRACTION = 1 / 16
_WINDOW_SECONDS = 60.0
_MAX_ENDS = 256
_MIN_ENDS = 4
"""The fewest ended requests that give a rate."""
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0


class QueueSlots:
    """Bounds on requests in flight and on the bytes of waiting bodies, shared fairly by clients.

    A body waits from its last byte's arrival until the device begins with its request. Used from
    the event loop only.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = FairShare(limits.max_requests)
        self.waiting_bytes = FairShare(_limit_bytes(limits))
        """Bytes of waiting bodies, beyond the first 64 KiB of each."""
        self._rate = ServiceRate()
        self._awake = Awake()
        self._clock = clock

    def check(self, client: str, headers: Mapping[str, str]) -> None:
        """Raises QueueFull unless there is a slot, and room for the body that `headers` declare."""
        self.check_room(self.requests, client, 1)
        body_bytes = _declared_bytes(headers) - _FREE_BYTES
        if body_bytes > 0:
            self.check_room(self.waiting_bytes, client, body_bytes)

    @contextmanager
    def hold(self, client: str, num_bytes: int) -> Iterator[QueueSlot]:
        """Hold a slot with room for a body of `num_bytes` in the `with` block. Raises QueueFull."""
        self.check_room(self.requests, client, 1)
        slot = QueueSlot(self, client)
        slot.reserve(num_bytes)
        if not self.requests.taken:
            self._rate.begin(self._clock())
            self._awake.hold()
        self.requests.take(client, 1)
        try:
            yield slot
        finally:
            slot.release_body()
            self.requests.release(client, 1)
            self._rate.end(self._clock())
            if not self.requests.taken:
                self._awake.release()

    def retry_after_seconds(self) -> float:
        """`Retry-After` of a refused request: half to all of the queue's time.

        Random, so that refused clients do not return at the same time; at most all, so that the
        queue does not run dry before.
        """
        seconds = self._rate.seconds_for(self.requests.taken, self._clock())
        return max(_MIN_RETRY_SECONDS, seconds * random.uniform(0.5, 1.0))  # noqa: S311  not a secret

    def check_room(self, share: FairShare, client: str, amount: int) -> None:
        """Raises QueueFull unless `client` may take `amount` of `share`, which is then reserved."""
        now = self._clock()
        if share.has_room(client, amount, now):
            return
        seconds = self.retry_after_seconds()
        share.reserve_refused(client, amount, now + seconds + _RETRY_SECONDS)
        if share is self.waiting_bytes:
            subject, setting = "bytes for requests that wait are in use", "max_waiting_bytes"
        else:
            subject, setting = "requests are in flight", "max_requests"
        message = f"{share.taken} of {share.limit} {subject} (limits.{setting})"
        raise QueueFull(f"{message}; try again later.", retry_after_seconds=seconds)


class QueueSlot:
    """A request's place in the queue, and the bytes of its waiting body."""

    def __init__(self, slots: QueueSlots, client: str) -> None:
        self._slots = slots
        self._client = client
        self._num_reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for a body of `num_bytes` in all. Raises QueueFull if there is none."""
        more_bytes = num_bytes - _FREE_BYTES - self._num_reserved
        if more_bytes > 0:
            self._slots.check_room(self._slots.waiting_bytes, self._client, more_bytes)
            self._slots.waiting_bytes.take(self._client, more_bytes)
            self._num_reserved += more_bytes

    def reserve_beside(self, held_bytes: int) -> Callable[[int], None]:
        """`reserve`, for bytes that are held beside `held_bytes`."""
        return lambda num_bytes: self.reserve(held_bytes + num_bytes)

    def release_body(self) -> None:
        """Release the body's bytes; later calls do nothing."""
        self._slots.waiting_bytes.release(self._client, self._num_reserved)
        self._num_reserved = 0


class FairShare:
    """An amount of at most `limit` that clients share.

    Each client that holds a part, or was refused lately, has the same share. It may exceed that as
    long as the amounts reserved for refused clients stay free; so a single client may have
    everything. Times are monotonic seconds.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._held: Counter[str] = Counter()
        self._wants: dict[str, tuple[float, int]] = {}
        """(time, amount) by refused client: the amount reserved for it, and until when."""

    def has_room(self, client: str, amount: int, now: float) -> bool:
        """Whether `client` may take `amount` now."""
        self._wants = {key: want for key, want in self._wants.items() if want[0] > now}
        free_amount = self.limit - self.taken
        if amount > free_amount:
            return False
        other_clients = (self._wants.keys() | self._held.keys()) - {client}
        share = max(1, self.limit // (1 + len(other_clients)))
        held_amount = self._held[client]
        if not held_amount or held_amount + amount <= share:
            return True
        return amount <= free_amount - sum(
            self._amount_kept_for(other_client, share) for other_client in other_clients
        )

    def reserve_refused(self, client: str, amount: int, until: float) -> None:
        """Reserve `amount`, which `client` was refused, within its share until `until`."""
        self._wants[client] = until, amount

    def _amount_kept_for(self, client: str, share: int) -> int:
        _, amount = self._wants.get(client, (0.0, 0))
        return min(amount, max(0, share - self._held[client]))

    def take(self, client: str, amount: int) -> None:
        """Give `amount` more to `client`."""
        self.taken += amount
        self._held[client] += amount

    def release(self, client: str, amount: int) -> None:
        self.taken -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]


class ServiceRate:
    """The recent rate of ended requests; times are monotonic seconds."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._busy_since = 0.0

    def begin(self, now: float) -> None:
        """Note the first request after an idle time."""
        self._busy_since = now

    def end(self, now: float) -> None:
        """Note the end of a request."""
        self._ends.append(now)

    def seconds_for(self, num_requests: int, now: float) -> float:
        """Seconds that `num_requests` take at this rate, from 1 to 60.

        If too few have ended for a rate: as long as the requests have taken until now.
        """
        if not num_requests:
            return _MIN_RETRY_SECONDS
        since = max(self._busy_since, now - _WINDOW_SECONDS)
        if len(self._ends) == _MAX_ENDS:
            since = max(since, self._ends[0])
        num_ends = sum(at >= since for at in self._ends)
        seconds = now - since
        if num_ends >= _MIN_ENDS:
            seconds *= num_requests / num_ends
        return min(max(seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)


def _declared_bytes(headers: Mapping[str, str]) -> int:
    declared = headers.get("content-length", "")
    return int(declared[:20]) if declared.isdecimal() else 0


def _limit_bytes(limits: Limits) -> int:
    """`max_waiting_bytes`, by default a part of the machine's memory."""
    if limits.max_waiting_bytes:
        return max(limits.max_waiting_bytes, limits.max_body_bytes)
    memory = machine.memory_bytes()
    return max(_MIN_BODIES * limits.max_body_bytes, int(memory * _MEMORY_FRACTION))
