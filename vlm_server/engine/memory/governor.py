"""Decides what device memory may be used for, and when freed memory goes back to the system.

The only one that frees memory on purpose, by measured bytes. `interfaces.DeviceMemory`,
`interfaces.ProcessMemory` and the caches do it; each decision is counted by its reason. All calls
come from the inference thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from vlm_server.cache.caches import Caches
from vlm_server.engine.memory.estimator import MemoryEstimator
from vlm_server.interfaces import DeviceMemory, ProcessMemory
from vlm_server.protocol import MemoryStats
from vlm_server.settings import MemorySettings

logger = logging.getLogger(__name__)

MIB = 1 << 20
_SMALL_POOL_BYTES = 32 * MIB
"""Not worth giving back."""
_DECODED_TOKENS = 2048
"""Between two looks at the pool while answers run: the more sequences, the fewer steps."""
_NEAR_SHARE = 16
"""Memory is near its limit if less than this part (one in so many) of it is left."""
_DRIVER_SECONDS = 5.0
"""The greatest age of what the driver or the system says: asking takes time between two steps."""
_SYNCHRONIZE_CALLS = 8
"""Calls of `make_room_for_reserved` after which a wait that freed too little is tried again."""

_ClearReason = Literal[
    "idle",
    "guard",
    "chunk",
    "prefill",
    "decode",
    "others",
    "admission",
    "failure",
    "limit",
    "operator",
]


class Governor:
    """The rules for device memory, and how often each was applied."""

    def __init__(
        self,
        settings: MemorySettings,
        memory: DeviceMemory,
        process: ProcessMemory,
        caches: Caches,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._process = process
        self._caches = caches
        self._clock = clock
        self.estimator = MemoryEstimator(memory)
        self._baseline_bytes = 0
        """Memory of the model without any request; 0 until `reset_stats`."""
        self._counts: Counter[str] = Counter()
        self._clear_seconds = 0.0
        self._decoded_tokens = 0
        self._has_worked = False
        """Since the last `idle`."""
        self._idle_since: float | None = None
        self._in_flight_bytes = 0
        """Memory of launched work, which the last wait in `make_room_for_reserved` freed."""
        self._calls_until_synchronize = 0
        self._device_used_bytes = 0
        """As the driver said last."""
        self._driver_due = -math.inf
        self._is_short = False
        """Whether other programs needed memory then, and nothing was done about it since."""

    def reset_stats(self) -> None:
        """Take what is held now as held without any request; count decisions from zero."""
        self._clear("idle")
        self._baseline_bytes = self._memory.read().active_bytes
        self._counts.clear()
        self._clear_seconds = 0.0

    def count(self, decision: str) -> None:
        """Count a decision that the caller has made: `wait`, `refuse` or `failure_...`."""
        self._counts[decision] += 1

    # ---- commands of the front -------------------------------------------------------

    def set_limit(self, limit_bytes: int, reserved_bytes: int) -> None:
        """Device memory has another limit from now on; running requests keep `reserved_bytes`."""
        self._memory.set_limit(limit_bytes)
        self._caches.resize(max(0, limit_bytes - self._baseline_bytes))
        self._memory.synchronize()
        if (missing := self._missing(reserved_bytes)) > 0:
            self._evict(missing)
        if self._is_over(reserved_bytes):
            self._clear("limit")

    def clear_caches(self) -> None:
        """Drop what is cached and not in use, and give the pool back."""
        self._caches.drop()
        self._clear("operator")

    # ---- room for requests -----------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Memory for requests: the limit without what the model holds; may be negative."""
        return self._memory.read().limit_bytes - self._baseline_bytes

    def fits_alone(self, num_bytes: int) -> bool:
        """Whether a request of this size fits if no other runs; always true until `reset_stats`."""
        return not self._baseline_bytes or num_bytes <= self.free_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more fits beside what arrays hold."""
        return self._missing(num_bytes) <= 0

    def make_room(
        self,
        needed_bytes: int,
        reserved_bytes: int,
        *,
        others_run: bool,
        some_are_ending: bool = False,
    ) -> bool:
        """Make room for a request by the cheapest means; returns whether it may begin now.

        needed_bytes: of the request. reserved_bytes: what those admitted before it will still
        allocate. While `some_are_ending`, requests that have ended hold memory that will come back.
        The first of these that applies decides:

            there is room                                    begin
            room will come back by itself                    wait
            others run, and the caches hold too little       wait
            not tried yet                                    synchronize, and look again
            not tried yet                                    evict, and look again
            others run (they use what was to be evicted)     wait
            nobody else runs (an estimate may be too high)   begin

        Until `reset_stats` every request begins: the estimator learns from what it takes.
        """
        if not self._baseline_bytes:
            return True
        for action in ("synchronize", "evict", "nothing"):
            missing = self._missing(needed_bytes + reserved_bytes)
            evictable = self._caches.evictable_bytes
            if missing <= 0:
                break
            if some_are_ending or (others_run and (missing > evictable or action == "nothing")):
                return False
            if action == "synchronize":
                self._memory.synchronize()
            elif action == "evict":
                self._evict(min(missing, evictable))
        if self._must_clear(needed_bytes):
            self._clear("admission")
        return True

    def make_room_for_reserved(self, reserved_bytes: int) -> None:
        """Evict what was cached since, where sequences need what was reserved for them.

        To be called before every step. Waits for launched work only if there seems to be no room
        for a reason that waiting did not explain lately: that work holds memory, too.
        """
        self._calls_until_synchronize = max(0, self._calls_until_synchronize - 1)
        missing = self._missing(reserved_bytes)
        is_explained = self._calls_until_synchronize and missing <= self._in_flight_bytes
        can_evict = self._baseline_bytes and self._caches.evictable_bytes
        if missing <= 0 or is_explained or not can_evict:
            return
        self._memory.synchronize()
        left = self._missing(reserved_bytes)
        self._in_flight_bytes = missing - left
        self._calls_until_synchronize = _SYNCHRONIZE_CALLS
        if left > 0:
            self._evict(left)

    def _missing(self, num_bytes: int) -> int:
        """Bytes of `num_bytes` that do not fit beside what arrays hold; negative if all do."""
        reading = self._memory.read()
        return reading.active_bytes + num_bytes - reading.limit_bytes

    # ---- around reads, encodes, chunks and decode steps ------------------------------

    def before_load(self, num_bytes: int) -> None:
        """A read from disk, of at most `num_bytes`, comes next."""
        if self._is_over(num_bytes):
            self._clear("guard")

    def before_encode(self, num_tokens: int) -> None:
        """An encode of media of `num_tokens`, and of nothing else, comes next."""
        if self._is_over(self.estimator.of("encode", num_tokens)):
            self._clear("guard")
        self.estimator.begin("encode")

    def after_encode(self, num_tokens: int, size_bytes: int, tokens_at_once: int) -> None:
        """The features of `num_tokens` take `size_bytes`; 0 if the encode failed.

        What it took is learned for `tokens_at_once`, the tokens that were encoded in one call.
        """
        self.estimator.end("encode", tokens_at_once)
        made = size_bytes // max(1, num_tokens)
        self.estimator.feature_bytes = max(self.estimator.feature_bytes, made)

    def before_chunk(self) -> None:
        """A prefill chunk comes next."""
        self.estimator.begin("prefill")

    def after_chunk(self, num_tokens: int, *, is_last: bool, has_merged: bool) -> None:
        """A chunk of `num_tokens` of a prompt was prefilled.

        If it `has_merged` with running sequences, those were copied: no measure for other chunks.
        """
        self.estimator.end("prefill", num_tokens, is_typical=not has_merged)
        policy = self._settings.prefill_keep_alloc
        needed = self.estimator.of("prefill", num_tokens)
        if policy == "never" or (policy == "auto" and self._must_clear(needed)):
            self._clear("prefill" if is_last else "chunk")

    def after_decode(self, num_seqs: int, *, somebody_waits: bool) -> None:
        """A step gave `num_seqs` sequences a token each; to be called after every step, even of 0.

        somebody_waits: whether a request waits for the first token of its answer.
        """
        self.yield_to_others()
        self._decoded_tokens += num_seqs
        if self._decoded_tokens < _DECODED_TOKENS or somebody_waits:
            return
        self._decoded_tokens = 0
        if self._must_clear(self._memory.read().limit_bytes // _NEAR_SHARE):
            self._clear("decode")

    def yield_to_others(self) -> None:
        """If other programs needed memory when the driver was asked last, give some back.

        The pool first; half of the caches if it is empty.
        """
        if not self._is_short:
            return
        self._is_short = False
        if self._memory.read().pool_bytes > _SMALL_POOL_BYTES:
            self._clear("others")
        else:
            self._evict(-(-self._caches.evictable_bytes // 2))

    def seconds_to_look(self) -> float | None:
        """Seconds until `read` and `yield_to_others` want to be called without any other reason.

        None if there is nothing that others could need, or if they can't need it.
        """
        pool_bytes = self._memory.read().pool_bytes
        has_some = pool_bytes > _SMALL_POOL_BYTES or self._caches.evictable_bytes > 0
        if not (self._memory.is_shared and has_some):
            return None
        return 0.0 if self._is_short else max(0.0, self._driver_due - self._clock())

    def relieve(self) -> None:
        """Free whatever nobody uses, since an allocation failed."""
        self._evict(self._caches.evictable_bytes)
        self._clear("failure")

    def _must_clear(self, needed_bytes: int) -> bool:
        """Whether the pool would be in the way, and the allocator does not trim it by itself."""
        return not self._memory.trims_own_pool and self._is_over(needed_bytes)

    def _is_over(self, needed_bytes: int) -> bool:
        """Whether the pool would be in the way of so much more."""
        reading = self._memory.read()
        held = reading.active_bytes + reading.pool_bytes
        return reading.pool_bytes > 0 and held + needed_bytes > reading.limit_bytes

    # ---- idle ------------------------------------------------------------------------

    def mark_busy(self) -> None:
        """There is a request: an idle clear that was due is not any more."""
        self._idle_since = None
        self._has_worked = True

    def idle_seconds_left(self) -> float | None:
        """Seconds until `idle` wants to be called; None if never, as long as nothing comes."""
        if not self._has_worked:
            return None
        if self._idle_since is None:
            self._idle_since = self._clock()
        return max(0.0, self._idle_since + self._settings.idle_clear_seconds - self._clock())

    def idle(self) -> None:
        """Give memory back after `memory.idle_clear_seconds` without requests."""
        self._has_worked, self._idle_since = False, None
        if self._memory.read().pool_bytes > _SMALL_POOL_BYTES:
            self._clear("idle")
        self._process.trim()

    # ---- doing -----------------------------------------------------------------------

    def _clear(self, reason: _ClearReason) -> None:
        before = self._memory.read().pool_bytes
        started = time.perf_counter()
        self._memory.clear()
        seconds = time.perf_counter() - started
        self._clear_seconds += seconds
        self._counts[f"clear_{reason}"] += 1
        logger.info("gave %d MiB back (%s) in %.1f ms", before // MIB, reason, 1000 * seconds)

    def _evict(self, num_bytes: int) -> None:
        """Evict `num_bytes` from the caches, or all they can, the least recently used first."""
        if freed := self._caches.evict(num_bytes):
            self._counts["evict"] += 1
            logger.info("evicted %d MiB of the caches", freed // MIB)

    def _ask_driver(self) -> None:
        """Ask what all programs use of the device; now and then, and outside of steps."""
        now = self._clock()
        if now < self._driver_due:
            return
        self._driver_due = now + _DRIVER_SECONDS
        self._device_used_bytes = self._memory.device_used_bytes()
        self._is_short = self._memory.is_short()

    def read(self, reserved_bytes: int = 0) -> MemoryStats:
        """For `/v1/status` and `/metrics`. To be called between two steps."""
        self._ask_driver()
        reading = self._memory.read()
        return MemoryStats(
            active_bytes=reading.active_bytes,
            pool_bytes=reading.pool_bytes,
            peak_bytes=self.estimator.peak_bytes,
            limit_bytes=reading.limit_bytes,
            baseline_bytes=self._baseline_bytes,
            footprint_bytes=self._process.footprint_bytes(),
            device_used_bytes=self._device_used_bytes,
            decisions=dict(self._counts),
            clear_seconds=self._clear_seconds,
            reserved_bytes=reserved_bytes,
        )
