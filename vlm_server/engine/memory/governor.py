"""Decides what device memory may be used for, and when freed memory goes back to the system.

The only one that frees memory on purpose. It decides by bytes, as measured; `ports.DeviceMemory`,
`ports.ProcessMemory` and the caches carry it out, and each decision is counted by reason. All calls
come from the inference thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable

from vlm_server.cache.caches import Caches
from vlm_server.engine.memory.decisions import Clear, Decision, Demand, Evict, Keep, Refuse, Wait
from vlm_server.engine.memory.estimator import MemoryEstimator
from vlm_server.interfaces import DeviceMemory, MemoryReading, ProcessMemory
from vlm_server.protocol import MemoryStats
from vlm_server.settings import Memory as MemorySettings

logger = logging.getLogger(__name__)

MIB = 1 << 20
_SMALL_POOL_BYTES = 32 * MIB
"""Not worth giving back."""
_DECODED_TOKENS = 2048
"""Between two looks at the pool while answers run: the more sequences, the fewer steps."""
_NEAR_SHARE = 16
"""Memory is near its limit if less than this part (one in so many) of it is left."""
_DRIVER_SECONDS = 5.0
"""How old what the driver or the system says may be: asking takes time between two steps."""
_SETTLE_CALLS = 8
"""Calls of `make_room_for_reserved` after which a settling that helped nothing is tried again."""


class Governor:
    """The rules, and how often each was applied."""

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
        self._counts: Counter[str] = Counter()
        self._clear_seconds = 0.0
        self._decoded_tokens = 0
        self._has_worked = False
        """Since the last `idle`."""
        self._idle_since: float | None = None
        self._in_flight_bytes = 0
        """What the last settling freed in `make_room_for_reserved`: work under way held it."""
        self._calls_until_settle = 0
        self._device_used_bytes = 0
        """As the driver said last."""
        self._driver_due = -math.inf
        self._is_short = False
        """Whether other programs needed memory then, and nothing was done about it since."""

    def reset_stats(self) -> None:
        """Take what is held now as held without any request; count decisions from zero."""
        self._carry_out(Clear("idle"))
        self._baseline_bytes = self._memory.read().active_bytes
        self._counts.clear()
        self._clear_seconds = 0.0

    # ---- what the front decides ------------------------------------------------------

    def set_limit(self, limit_bytes: int, reserved_bytes: int) -> None:
        """Device memory has another limit from now on; running requests keep `reserved_bytes`."""
        self._memory.set_limit(limit_bytes)
        self._caches.resize(max(0, limit_bytes - self._baseline_bytes))
        self._memory.settle()
        if (missing := self._missing(reserved_bytes)) > 0:
            self._carry_out(Evict(missing))
        if self._is_over(self._memory.read(), reserved_bytes):
            self._carry_out(Clear("limit"))

    def clear_caches(self) -> None:
        """Drop what is cached and not in use, and give the pool back."""
        self._caches.drop()
        self._carry_out(Clear("operator"))

    # ---- admission -------------------------------------------------------------------

    def admit(
        self, demand: Demand, reserved_bytes: int, *, others_run: bool, is_settled: bool = True
    ) -> Decision:
        """Keep, Wait or Refuse. Evicts and clears first what is in the way.

        `reserved_bytes` is what the requests admitted before will still allocate. Unless
        `is_settled`, requests that have ended still hold memory, and nothing is evicted yet. Until
        `reset_stats` all are admitted: the estimator learns from what they take.
        """
        if not self._baseline_bytes:
            return Keep()
        has_settled = evicted = False
        while True:
            reading = self._memory.read()
            decision = self._admission(reading, demand, reserved_bytes, others_run=others_run)
            if isinstance(decision, Evict) and not is_settled:
                return Wait()
            if isinstance(decision, Evict) and not has_settled:
                has_settled = True
                self._memory.settle()
                continue
            if isinstance(decision, Evict) and not evicted:
                evicted = True
                self._carry_out(decision)
                continue
            if isinstance(decision, Evict):  # what was evicted is still in use somewhere
                decision = Wait() if others_run else Keep()
            if isinstance(decision, Keep) and self._must_clear(reading, demand.needed_bytes):
                self._carry_out(Clear("admission"))
            if isinstance(decision, Refuse):
                self._counts["refuse"] += 1
            return decision

    def _admission(
        self, reading: MemoryReading, demand: Demand, reserved_bytes: int, *, others_run: bool
    ) -> Decision:
        most_bytes = reading.limit_bytes - self._baseline_bytes
        if demand.alone_bytes > most_bytes:
            return Refuse(demand.alone_bytes, most_bytes)
        missing = (
            demand.needed_bytes + reserved_bytes - (reading.limit_bytes - reading.active_bytes)
        )
        if missing <= 0:
            return Keep()
        evictable = self._caches.evictable_bytes
        if missing <= evictable:
            return Evict(missing)
        if others_run:
            return Wait()
        return Evict(evictable) if evictable else Keep()

    def make_room_for_reserved(self, reserved_bytes: int) -> None:
        """Evict what was cached since, where sequences need what was reserved for them.

        To be called before every step. Waits for work under way only if there seems to be no room
        for a reason that waiting did not explain lately: that work holds memory, too.
        """
        self._calls_until_settle = max(0, self._calls_until_settle - 1)
        missing = self._missing(reserved_bytes)
        is_explained = self._calls_until_settle and missing <= self._in_flight_bytes
        can_evict = self._baseline_bytes and self._caches.evictable_bytes
        if missing <= 0 or is_explained or not can_evict:
            return
        self._memory.settle()
        settled = self._missing(reserved_bytes)
        self._in_flight_bytes, self._calls_until_settle = missing - settled, _SETTLE_CALLS
        if settled > 0:
            self._carry_out(Evict(settled))

    def _missing(self, reserved_bytes: int) -> int:
        """Bytes of `reserved_bytes` that do not fit beside what arrays hold; negative if all do."""
        reading = self._memory.read()
        return reading.active_bytes + reserved_bytes - reading.limit_bytes

    @property
    def free_bytes(self) -> int:
        """What requests may use beside what is there without any; negative if that is too much."""
        return self._memory.read().limit_bytes - self._baseline_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more fits beside what arrays hold."""
        return self._missing(num_bytes) <= 0

    def note_failure(self, kind: str) -> None:
        """Work has failed since it was too much for the device."""
        self._counts[f"failure_{kind}"] += 1

    def note_wait(self) -> None:
        """A request has begun to wait for memory."""
        self._counts["wait"] += 1

    # ---- around reads, encodes, chunks and decode steps ------------------------------

    def before_load(self, num_bytes: int) -> None:
        """So much is read from disk next, at most."""
        self._carry_out(self._guard(self._memory.read(), num_bytes))

    def before_encode(self, num_tokens: int) -> None:
        """Media of so many tokens are encoded next, and nothing else is."""
        needed = self.estimator.of("encode", num_tokens)
        self._carry_out(self._guard(self._memory.read(), needed))
        self.estimator.begin("encode")

    def after_encode(self, num_tokens: int, size_bytes: int, tokens_at_once: int) -> None:
        """Their features take `size_bytes`; 0 if the encode failed.

        What it took is learned for `tokens_at_once`: so many of them were encoded in one call.
        """
        self.estimator.end("encode", tokens_at_once)
        made = size_bytes // max(1, num_tokens)
        self.estimator.feature_bytes = max(self.estimator.feature_bytes, made)

    def before_chunk(self) -> None:
        self.estimator.begin("prefill")

    def after_chunk(self, num_tokens: int, *, is_last: bool, has_merged: bool) -> None:
        """A chunk of so many tokens of a prompt was prefilled.

        If it `has_merged` with running sequences, those were copied: no measure for other chunks.
        """
        self.estimator.end("prefill", num_tokens, is_typical=not has_merged)
        needed = self.estimator.of("prefill", num_tokens)
        self._carry_out(self._chunk_rule(self._memory.read(), needed, is_last=is_last))

    def after_decode(self, num_seqs: int, *, somebody_waits: bool) -> None:
        """So many sequences got a token each; `somebody_waits` for the first of an answer.

        To be called after every step, whether or not anything was decoded.
        """
        self.yield_to_others()
        self._decoded_tokens += num_seqs
        if self._decoded_tokens < _DECODED_TOKENS or somebody_waits:
            return
        self._decoded_tokens = 0
        self._carry_out(self._decode_rule(self._memory.read()))

    def yield_to_others(self) -> None:
        """If other programs needed memory when the driver was asked last, give some back.

        The pool first; half of the caches if it is empty.
        """
        if self._is_short:
            self._is_short = False
            self._carry_out(self._others_rule(self._memory.read()))

    def seconds_to_look(self) -> float | None:
        """When `read` and `yield_to_others` want to be called though nothing else happens.

        None if there is nothing that others could need, or if they can't need it.
        """
        pool_bytes = self._memory.read().pool_bytes
        has_some = pool_bytes > _SMALL_POOL_BYTES or self._caches.evictable_bytes > 0
        if not (self._memory.is_shared and has_some):
            return None
        return 0.0 if self._is_short else max(0.0, self._driver_due - self._clock())

    def relieve(self) -> None:
        """An allocation failed: free whatever nobody uses."""
        self._carry_out(Evict(self._caches.evictable_bytes))
        self._carry_out(Clear("failure"))

    def _guard(self, reading: MemoryReading, needed_bytes: int) -> Decision:
        return Clear("guard") if self._is_over(reading, needed_bytes) else Keep()

    def _chunk_rule(self, reading: MemoryReading, needed_bytes: int, *, is_last: bool) -> Decision:
        policy = self._settings.prefill_keep_alloc
        is_tight = policy == "auto" and self._must_clear(reading, needed_bytes)
        if policy == "never" or is_tight:
            return Clear("prefill" if is_last else "chunk")
        return Keep()

    def _decode_rule(self, reading: MemoryReading) -> Decision:
        is_near = self._must_clear(reading, reading.limit_bytes // _NEAR_SHARE)
        return Clear("decode") if is_near else Keep()

    def _others_rule(self, reading: MemoryReading) -> Decision:
        if reading.pool_bytes > _SMALL_POOL_BYTES:
            return Clear("others")
        return Evict(-(-self._caches.evictable_bytes // 2))

    def _must_clear(self, reading: MemoryReading, needed_bytes: int) -> bool:
        """Whether the pool would be in the way, and the allocator does not trim it by itself."""
        return not self._memory.trims_own_pool and self._is_over(reading, needed_bytes)

    @staticmethod
    def _is_over(reading: MemoryReading, needed_bytes: int) -> bool:
        """Whether the pool would be in the way of so much more."""
        held = reading.active_bytes + reading.pool_bytes
        return reading.pool_bytes > 0 and held + needed_bytes > reading.limit_bytes

    # ---- idle ------------------------------------------------------------------------

    def note_work(self) -> None:
        """There is a request: an idle clear that was due is not any more."""
        self._idle_since = None
        self._has_worked = True

    def idle_seconds_left(self) -> float | None:
        """When `idle` wants to be called; None if never, as long as nothing comes."""
        if not self._has_worked:
            return None
        if self._idle_since is None:
            self._idle_since = self._clock()
        return max(0.0, self._idle_since + self._settings.idle_clear_seconds - self._clock())

    def idle(self) -> None:
        """Nothing came for `memory.idle_clear_seconds`: nobody waits for what this takes."""
        self._has_worked, self._idle_since = False, None
        self._carry_out(self._idle_rule(self._memory.read()))
        self._process.trim()

    def _idle_rule(self, reading: MemoryReading) -> Decision:
        return Clear("idle") if reading.pool_bytes > _SMALL_POOL_BYTES else Keep()

    # ---- doing -----------------------------------------------------------------------

    def _ask_driver(self) -> None:
        """What all programs use of the device; now and then, and outside of steps."""
        now = self._clock()
        if now < self._driver_due:
            return
        self._driver_due = now + _DRIVER_SECONDS
        self._device_used_bytes = self._memory.device_used_bytes()
        self._is_short = self._memory.is_short()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Clear(reason):
                before = self._memory.read().pool_bytes
                started = time.perf_counter()
                self._memory.clear()
                seconds = time.perf_counter() - started
                self._clear_seconds += seconds
                self._counts[f"clear_{reason}"] += 1
                logger.info(
                    "gave %d MiB back (%s) in %.1f ms", before // MIB, reason, 1000 * seconds
                )
            case Evict(num_bytes):
                if freed := self._caches.evict(num_bytes):
                    self._counts["evict"] += 1
                    logger.info("evicted %d MiB of the caches", freed // MIB)
            case _:
                pass

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
