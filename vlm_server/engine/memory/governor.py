"""Decides what device memory may be used for, and when freed memory goes back to the system.

All decisions to free device memory are made here, from measured bytes, and counted by reason.
`interfaces.DeviceMemory`, `interfaces.ProcessMemory` and the caches carry them out. All calls come
from the inference thread.
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
from vlm_server.settings import MIB, MemorySettings
from vlm_server.sizes import memory_size

logger = logging.getLogger(__name__)

_SMALL_POOL_BYTES = 32 * MIB
"""A pool of this size is not worth giving back."""
_DECODED_TOKENS = 2048
"""Tokens decoded between two checks of the pool: the more sequences, the fewer steps."""
_NEAR_SHARE = 16
"""Memory is near its limit if less than 1 / `_NEAR_SHARE` of it is left."""
_DRIVER_SECONDS = 5.0
"""The maximum age of the driver's or system's figures: a query takes time between two steps."""
_SYNCHRONIZE_CALLS = 8
"""Calls of `make_room_for_reserved` after which a synchronization that did not help is retried."""

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
    """The rules for device memory, and counts of their applications."""

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
        """Whether there was work since the last `clear_when_idle`."""
        self._idle_since: float | None = None
        self._in_flight_bytes = 0
        """Memory of launched work, freed by the last wait in `make_room_for_reserved`."""
        self._calls_until_synchronize = 0
        self._device_used_bytes = 0
        """Device memory in use by all programs, by the driver's last report."""
        self._driver_due = -math.inf
        self._is_short = False
        """Whether the last report says that other programs need memory, with no reaction yet."""

    def reset_stats(self) -> None:
        """Set the baseline to the memory held now; count decisions from zero."""
        self._clear("idle")
        self._baseline_bytes = self._memory.read().active_bytes
        self._counts.clear()
        self._clear_seconds = 0.0

    def count_decision(self, decision: str) -> None:
        """Count a decision that the caller has made: `wait`, `refuse` or `failure_...`."""
        self._counts[decision] += 1

    # ---- commands of the front -------------------------------------------------------

    def set_limit(self, limit_bytes: int, reserved_bytes: int) -> None:
        """Change the limit of device memory; running requests keep `reserved_bytes`."""
        self._memory.set_limit(limit_bytes)
        self._caches.resize(max(0, limit_bytes - self._baseline_bytes))
        self._memory.synchronize()
        if (missing_bytes := self._missing(reserved_bytes)) > 0:
            self._evict(missing_bytes)
        if self._is_over(reserved_bytes):
            self._clear("limit")

    def clear_caches(self) -> None:
        """Drop unused cache entries, and give the pool back."""
        self._caches.drop()
        self._clear("operator")

    # ---- room for requests -----------------------------------------------------------

    @property
    def bytes_for_requests(self) -> int:
        """Memory that requests share, used or not: the limit less the baseline; may be negative."""
        return self._memory.read().limit_bytes - self._baseline_bytes

    def fits_alone(self, num_bytes: int) -> bool:
        """Whether a request of this size fits if it runs alone; true until `reset_stats`."""
        return not self._baseline_bytes or num_bytes <= self.bytes_for_requests

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` fit in addition to the arrays that exist."""
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

        needed_bytes: memory of the request. reserved_bytes: memory that admitted requests will
        still allocate. some_are_ending: whether ended requests hold memory that will be freed. The
        first row that applies decides:

            there is room                                        begin
            ended requests will free memory                      wait
            others run, and the caches hold too little           wait
            not synchronized yet                                 synchronize, and look again
            not evicted yet                                      evict, and look again
            others run (and use the entries to be evicted)       wait
            no other request runs (the estimate may be too high) begin

        Until `reset_stats` every request begins: the estimator learns from it.
        """
        if not self._baseline_bytes:
            return True
        for action in ("synchronize", "evict", "nothing"):
            missing_bytes = self._missing(needed_bytes + reserved_bytes)
            evictable_bytes = self._caches.evictable_bytes
            if missing_bytes <= 0:
                break
            if some_are_ending or (
                others_run and (missing_bytes > evictable_bytes or action == "nothing")
            ):
                return False
            if action == "synchronize":
                self._memory.synchronize()
            elif action == "evict":
                self._evict(min(missing_bytes, evictable_bytes))
        if self._must_clear(needed_bytes):
            self._clear("admission")
        return True

    def make_room_for_reserved(self, reserved_bytes: int) -> None:
        """Evict cache entries that occupy memory reserved for sequences.

        To be called before every step. Launched work holds memory, too; it is waited for only if
        more is missing than the last wait freed.
        """
        self._calls_until_synchronize = max(0, self._calls_until_synchronize - 1)
        missing_bytes = self._missing(reserved_bytes)
        is_explained = self._calls_until_synchronize and missing_bytes <= self._in_flight_bytes
        can_evict = self._baseline_bytes and self._caches.evictable_bytes
        if missing_bytes <= 0 or is_explained or not can_evict:
            return
        self._memory.synchronize()
        remaining_bytes = self._missing(reserved_bytes)
        self._in_flight_bytes = missing_bytes - remaining_bytes
        self._calls_until_synchronize = _SYNCHRONIZE_CALLS
        if remaining_bytes > 0:
            self._evict(remaining_bytes)

    def _missing(self, num_bytes: int) -> int:
        """Bytes of `num_bytes` that do not fit besides the arrays; negative if there is room."""
        reading = self._memory.read()
        return reading.active_bytes + num_bytes - reading.limit_bytes

    # ---- around disk reads, encodes, chunks and decode steps -------------------------

    def before_disk_read(self, num_bytes: int) -> None:
        """Prepare for a disk read of at most `num_bytes`."""
        if self._is_over(num_bytes):
            self._clear("guard")

    def before_encode(self, num_tokens: int) -> None:
        """Prepare for an encode of `num_tokens`."""
        if self._is_over(self.estimator.bytes_for("encode", num_tokens)):
            self._clear("guard")
        self.estimator.begin("encode")

    def after_encode(self, num_tokens: int, size_bytes: int, tokens_per_call: int) -> None:
        """Learn from an encode: features of `num_tokens` take `size_bytes`; 0 if it failed.

        The peak is learned as that of `tokens_per_call`, the tokens encoded in one call.
        """
        self.estimator.end("encode", tokens_per_call)
        feature_bytes = size_bytes // max(1, num_tokens)
        self.estimator.feature_bytes = max(self.estimator.feature_bytes, feature_bytes)

    def before_chunk(self) -> None:
        """Prepare for a prefill chunk."""
        self.estimator.begin("prefill")

    def after_chunk(self, num_tokens: int, *, is_last: bool, made_copies: bool) -> None:
        """Learn from a prefilled chunk of `num_tokens`; clear the pool by `prefill_keep_alloc`.

        made_copies: whether running sequences were copied, which the prompt joined, or the prompt,
        for its options: the peak is no measure for other chunks.
        """
        self.estimator.end("prefill", num_tokens, is_typical=not made_copies)
        policy = self._settings.prefill_keep_alloc
        needed_bytes = self.estimator.bytes_for("prefill", num_tokens)
        if policy == "never" or (policy == "auto" and self._must_clear(needed_bytes)):
            self._clear("prefill" if is_last else "chunk")

    def after_decode(self, num_seqs: int, *, awaits_first_token: bool) -> None:
        """Clear the pool now and then; to be called after every step, with its decoded sequences.

        awaits_first_token: whether a request waits for the first token of its answer.
        """
        self.give_back_to_other_programs()
        self._decoded_tokens += num_seqs
        if self._decoded_tokens < _DECODED_TOKENS or awaits_first_token:
            return
        self._decoded_tokens = 0
        if self._must_clear(self._memory.read().limit_bytes // _NEAR_SHARE):
            self._clear("decode")

    def give_back_to_other_programs(self) -> None:
        """If other programs need memory, clear the pool or, if it is empty, evict half the caches.

        Whether they do is what the driver last reported (`_ask_driver`).
        """
        if not self._is_short:
            return
        self._is_short = False
        if self._memory.read().pool_bytes > _SMALL_POOL_BYTES:
            self._clear("others")
        else:
            self._evict(-(-self._caches.evictable_bytes // 2))

    def seconds_until_poll(self) -> float | None:
        """Seconds until `stats` and `give_back_to_other_programs` are due on an idle engine.

        None if there is nothing to free, or if device memory is not shared with other programs.
        """
        pool_bytes = self._memory.read().pool_bytes
        can_free = pool_bytes > _SMALL_POOL_BYTES or self._caches.evictable_bytes > 0
        if not (self._memory.is_shared and can_free):
            return None
        return 0.0 if self._is_short else max(0.0, self._driver_due - self._clock())

    def free_unused_memory(self) -> None:
        """Free all unused memory after a failed allocation."""
        self._evict(self._caches.evictable_bytes)
        self._clear("failure")

    def _must_clear(self, needed_bytes: int) -> bool:
        """Whether `needed_bytes` exceed the limit with a pool that the allocator won't trim."""
        return not self._memory.trims_own_pool and self._is_over(needed_bytes)

    def _is_over(self, needed_bytes: int) -> bool:
        """Whether `needed_bytes` exceed the limit because of the pool."""
        reading = self._memory.read()
        total_bytes = reading.active_bytes + reading.pool_bytes + needed_bytes
        return reading.pool_bytes > 0 and total_bytes > reading.limit_bytes

    # ---- idle ------------------------------------------------------------------------

    def mark_busy(self) -> None:
        """Record that there is a request: the engine is not idle."""
        self._idle_since = None
        self._has_worked = True

    def seconds_until_clear(self) -> float | None:
        """Seconds until `clear_when_idle` is due; None if there was no work since the last one."""
        if not self._has_worked:
            return None
        if self._idle_since is None:
            self._idle_since = self._clock()
        return max(0.0, self._idle_since + self._settings.idle_clear_seconds - self._clock())

    def clear_when_idle(self) -> None:
        """Give memory back after `memory.idle_clear_seconds` without requests."""
        self._has_worked, self._idle_since = False, None
        if self._memory.read().pool_bytes > _SMALL_POOL_BYTES:
            self._clear("idle")
        self._process.trim()

    # ---- doing -----------------------------------------------------------------------

    def _clear(self, reason: _ClearReason) -> None:
        pool_bytes = self._memory.read().pool_bytes
        started_at = time.perf_counter()
        self._memory.clear()
        seconds = time.perf_counter() - started_at
        self._clear_seconds += seconds
        self._counts[f"clear_{reason}"] += 1
        size, milliseconds = memory_size(pool_bytes), 1000 * seconds
        logger.debug("cleared %s of pool (%s) in %.1f ms", size, reason, milliseconds)

    def _evict(self, num_bytes: int) -> None:
        """Evict up to `num_bytes` from the caches, the least recently used entries first."""
        if freed_bytes := self._caches.evict(num_bytes):
            self._counts["evict"] += 1
            logger.debug("evicted %s of the caches", memory_size(freed_bytes))

    def _ask_driver(self) -> None:
        """Query the device memory in use by all programs, at most every `_DRIVER_SECONDS`."""
        now = self._clock()
        if now < self._driver_due:
            return
        self._driver_due = now + _DRIVER_SECONDS
        self._device_used_bytes = self._memory.device_used_bytes()
        self._is_short = self._memory.is_short()

    def stats(self, reserved_bytes: int = 0) -> MemoryStats:
        """The figures for `/v1/status` and `/metrics`, the driver's among them (`_ask_driver`).

        To be called between two steps.
        """
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
