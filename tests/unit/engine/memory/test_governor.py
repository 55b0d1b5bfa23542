"""The governor's decisions, on a fake memory whose sizes the test sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from tests.unit.engine.fakes import FakeMemory, FakeProcess
from vlm_server.cache.caches import Caches
from vlm_server.engine.memory.estimator import MemoryEstimator
from vlm_server.engine.memory.governor import Governor
from vlm_server.settings import MemorySettings

MIB = 1 << 20
WEIGHTS = 100


class _Features:
    size_bytes = 0
    tokens_per_call: int | None = None


class GovernorHarness:
    """A device of 1000 MiB, of which weights hold 100; a cache, and a clock. Sizes in MiB."""

    def __init__(self, **settings: object) -> None:
        self.memory = FakeMemory(WEIGHTS * MIB, 0, 1000 * MIB, peak_bytes=0)
        self.process = FakeProcess()
        self.caches = Caches(encoder_bytes=500 * MIB)
        self.seconds = 0.0
        settings = {"idle_clear_seconds": 1.0, **settings}
        self.governor = Governor(
            MemorySettings(**settings),  # type: ignore[arg-type]
            self.memory,
            self.process,
            self.caches,
            lambda: self.seconds,
        )
        self.governor.reset_stats()
        self._held = 0

    def hold(self, active: int = 0, pool: int = 0) -> None:
        """Allocate `active` MiB beside the weights and the cache, and a pool."""
        self._held = active
        self.memory.pool_bytes = pool * MIB
        self._settle()

    def cache(self, name: str, size: int) -> None:
        """Store an entry that no request uses."""
        self.caches.features.put(name, _Features(), size * MIB).release()
        self._settle()

    def admit(self, resident: int, transient: int = 0, reserved: int = 0, **who: bool) -> str:
        """The decision on a request, by default while no other runs."""
        who = {"others_run": False, **who}
        if not self.governor.fits_alone(resident * MIB):
            return "refuse"
        needed = (resident + transient) * MIB
        return "admit" if self.governor.make_room(needed, reserved * MIB, **who) else "wait"

    def _settle(self) -> None:
        cached = self.caches.features.stats().size_bytes
        self.memory.active_bytes = (WEIGHTS + self._held) * MIB + cached

    @property
    def cached(self) -> int:
        return self.caches.features.stats().size_bytes // MIB

    @property
    def decisions(self) -> dict[str, int]:
        return {kind: count for kind, count in self.governor.stats().decisions.items() if count}


@pytest.fixture
def harness() -> GovernorHarness:
    return GovernorHarness()


# ---- admission ---------------------------------------------------------------------------


def test_fitting_request_is_admitted(harness: GovernorHarness):
    assert harness.admit(800, 100) == "admit"
    assert harness.decisions == {}


def test_request_waits_if_only_reserved_bytes_are_free(harness: GovernorHarness):
    harness.hold(active=300)
    assert harness.admit(300, 100, reserved=200, others_run=True) == "admit"
    assert harness.admit(300, 101, reserved=200, others_run=True) == "wait"


def test_admission_evicts_oldest_cache_entries_as_needed(harness: GovernorHarness):
    for name in ("oldest", "middle", "newest"):
        harness.cache(name, 150)
    harness.admit(600, others_run=True)
    assert harness.cached == 300
    assert "oldest" not in harness.caches.features
    assert harness.decisions["evict"] == 1


def test_leased_features_are_not_evicted(harness: GovernorHarness):
    harness.cache("in use", 400)
    lease = harness.caches.features.lease("in use")
    assert harness.admit(600, others_run=True) == "wait"
    assert lease is not None
    lease.release()
    harness.admit(600, others_run=True)
    assert harness.cached == 0


def test_request_larger_than_limit_is_refused(harness: GovernorHarness):
    assert harness.admit(901) == "refuse"
    harness.hold(active=500)
    assert harness.admit(901, others_run=True) == "refuse"


def test_learned_transient_bytes_never_refuse_request(harness: GovernorHarness):
    assert harness.admit(100, 5000, others_run=True) == "wait"
    assert harness.admit(100, 5000) == "admit"


def test_request_waits_for_ending_requests_before_eviction(harness: GovernorHarness):
    harness.cache("a", 400)
    harness.hold(active=450)
    assert harness.admit(300, others_run=True, some_are_ending=True) == "wait"
    assert harness.cached == 400
    harness.hold(active=0)
    assert harness.admit(300) == "admit"
    assert harness.cached == 400


def test_admission_synchronizes_before_it_evicts(harness: GovernorHarness):
    harness.cache("a", 400)
    harness.hold(active=300)
    harness.memory.unsettled_bytes = 300 * MIB
    assert harness.admit(400, others_run=True) == "admit"
    assert harness.cached == 400
    assert harness.decisions == {}


def test_reserved_bytes_evict_newer_cache_entries(harness: GovernorHarness):
    """Entries stored after the reservation take up memory that a growing row was promised."""
    harness.cache("old", 150)
    harness.cache("new", 150)
    harness.hold(active=200)
    harness.governor.make_room_for_reserved(400 * MIB)
    assert harness.cached == 300
    harness.hold(active=350)
    harness.governor.make_room_for_reserved(400 * MIB)
    assert (harness.cached, "old" in harness.caches.features) == (150, False)
    assert harness.decisions == {"evict": 1}


def test_make_room_for_reserved_synchronizes_in_at_most_every_eighth_step(harness: GovernorHarness):
    """A running step holds memory. Waiting for each would undo the overlap of device and host."""
    harness.cache("a", 100)
    harness.hold(active=700)
    settled = 0

    def step() -> None:
        nonlocal settled
        harness.memory.active_bytes += 60 * MIB
        harness.memory.unsettled_bytes = 60 * MIB
        harness.governor.make_room_for_reserved(90 * MIB)
        settled += not harness.memory.unsettled_bytes
        harness.memory.synchronize()

    for _ in range(60):
        step()
    assert 1 <= settled <= 8
    assert harness.cached == 100
    assert harness.decisions == {}


def test_shortage_explained_by_launched_work_is_checked_again_after_eight_steps(
    harness: GovernorHarness,
):
    """By then, the same shortage may be that of grown rows, with no work under way."""
    harness.cache("a", 100)
    harness.hold(active=740)
    harness.memory.unsettled_bytes = 60 * MIB
    harness.governor.make_room_for_reserved(90 * MIB)
    assert harness.cached == 100
    harness.hold(active=740)
    for _ in range(8):
        harness.governor.make_room_for_reserved(90 * MIB)
    assert harness.cached == 0


def test_shortage_beyond_launched_work_evicts_at_once(harness: GovernorHarness):
    harness.cache("a", 100)
    harness.hold(active=740)
    harness.memory.unsettled_bytes = 10 * MIB
    harness.governor.make_room_for_reserved(65 * MIB)
    assert harness.cached == 100
    harness.governor.make_room_for_reserved(90 * MIB)
    assert harness.cached == 0


def test_empty_eviction_is_not_counted(harness: GovernorHarness):
    harness.governor.free_unused_memory()
    assert harness.decisions == {"clear_failure": 1}


def test_admission_recovers_from_pressure_of_other_programs(harness: GovernorHarness):
    """Meanwhile a request that could fit alone waits for others, or begins if there are none."""
    harness.hold(active=850)
    assert harness.admit(300, others_run=True) == "wait"
    assert harness.admit(300) == "admit", "no other request's end would free memory"
    harness.hold(active=100)
    assert harness.admit(300, others_run=True) == "admit"


def test_pool_is_cleared_only_if_admission_needs_its_bytes(harness: GovernorHarness):
    harness.hold(pool=190)
    assert harness.admit(600) == "admit"
    assert harness.memory.pool_bytes == 190 * MIB
    assert harness.admit(720) == "admit"
    assert harness.memory.pool_bytes == 0
    assert harness.decisions == {"clear_admission": 1}


def test_self_trimming_pool_is_cleared_only_for_encodes():
    harness = GovernorHarness(prefill_keep_alloc="auto")
    harness.memory.trims_own_pool = True
    learn(harness, "prefill", 512, 100)
    learn(harness, "encode", 400, 400)
    harness.hold(active=500, pool=350)
    assert harness.admit(300) == "admit"
    harness.governor.before_chunk()
    harness.governor.after_chunk(512, is_last=False, made_copies=False)
    assert harness.decisions == {}
    harness.governor.before_encode(200)
    assert harness.decisions == {"clear_guard": 1}


# ---- under load --------------------------------------------------------------------------


GIB = 1024


def gpu(**settings: object) -> GovernorHarness:
    """A device of 139 GiB, as a program of its own may use it, with weights of 6 GiB."""
    harness = GovernorHarness(**settings)
    memory = harness.memory
    memory.trims_own_pool = True
    memory.limit_bytes = 125 * GIB * MIB
    memory.used_bytes = 40 * GIB * MIB
    harness.hold(active=10 * GIB, pool=12 * GIB)
    return harness


def serve(harness: GovernorHarness, seconds: int) -> None:
    """Eight users' streams with new images, at 40 steps a second; statistics every second."""
    governor = harness.governor
    needed = (60 + 6 * GIB) * MIB
    for _ in range(seconds):
        harness.seconds += 1.0
        governor.mark_busy()
        governor.make_room(needed, GIB * MIB, others_run=True)
        governor.before_encode(1131)
        governor.after_encode(1131, 5 * MIB, tokens_per_call=1131)
        governor.before_chunk()
        governor.after_chunk(1200, is_last=True, made_copies=True)
        for _ in range(40):
            governor.make_room_for_reserved(GIB * MIB)
            governor.after_decode(8, awaits_first_token=False)
        governor.stats()


def test_pool_is_never_cleared_with_ample_memory():
    """The pool holds 12 GiB, and 100 GiB are free besides."""
    harness = gpu()
    learn(harness, "encode", 256, 2 * GIB)
    serve(harness, 600)
    assert harness.decisions == {}
    assert harness.process.num_trims == 0


def test_driver_is_polled_at_most_every_five_seconds():
    """A query takes time between two steps."""
    harness = gpu()
    serve(harness, 100)
    assert 20 <= harness.memory.num_driver_calls <= 21


def test_pool_is_cleared_once_per_driver_report_of_shortage():
    """In a step that decodes or only prefills, and again after the next report."""
    harness = gpu()
    harness.memory.others_need_some = True
    harness.governor.stats()
    for _ in range(3):
        harness.hold(active=10 * GIB, pool=GIB)
        harness.governor.after_decode(0, awaits_first_token=True)
    assert harness.decisions == {"clear_others": 1}
    harness.seconds += 5.0
    harness.governor.stats()
    harness.governor.after_decode(0, awaits_first_token=True)
    assert harness.decisions == {"clear_others": 2}


@pytest.mark.parametrize(("needed", "pool"), [(False, 12 * GIB), (True, 32)])
def test_pool_is_kept_without_need_or_if_small(needed: bool, pool: int):
    harness = gpu()
    harness.memory.others_need_some = needed
    harness.hold(active=10 * GIB, pool=pool)
    serve(harness, 20)
    assert harness.decisions == {}


def test_caches_are_halved_once_pool_is_empty():
    """Every five seconds, as long as the system is short of memory."""
    harness = gpu()
    harness.hold(active=10 * GIB, pool=0)
    for number in range(16):
        harness.cache(f"{number}", 1)
    harness.memory.others_need_some = True
    for left in (8, 4):
        harness.seconds += 5.0
        harness.governor.stats()
        harness.governor.give_back_to_other_programs()
        assert harness.cached == left
        harness.governor.give_back_to_other_programs()
        assert harness.cached == left, "the driver was not asked again"


def test_shared_memory_is_polled_while_idle():
    """But only while there is unused memory to free."""
    harness = gpu()
    harness.seconds += 5.0
    harness.governor.stats()
    assert harness.governor.seconds_until_poll() is None, "other programs have memory of their own"
    harness.memory.is_shared = True
    assert harness.governor.seconds_until_poll() == 5.0
    harness.seconds += 4.0
    assert harness.governor.seconds_until_poll() == 1.0
    harness.seconds += 1.0
    harness.memory.others_need_some = True
    harness.governor.stats()
    assert harness.governor.seconds_until_poll() == 0.0
    harness.governor.give_back_to_other_programs()
    assert harness.governor.seconds_until_poll() is None, "only the pool could be freed"


def test_untrimmed_pool_is_cleared_only_near_limit(harness: GovernorHarness):
    """With ample memory, only the pool's own limit bounds it."""
    harness.memory.limit_bytes = 12 * GIB * MIB
    learn(harness, "encode", 256, 500)
    harness.hold(active=500, pool=256)
    serve(harness, 60)
    assert harness.decisions == {}
    harness.memory.limit_bytes = 900 * MIB
    harness.governor.after_decode(2048, awaits_first_token=False)
    assert harness.decisions == {"clear_decode": 1}


# ---- encodes, chunks and decode steps ----------------------------------------------------


def learn(
    harness: GovernorHarness, work: Literal["encode", "prefill"], num_tokens: int, size: int
) -> None:
    """Let the estimator measure work whose peak is `size` MiB; clears nothing."""
    estimator = harness.governor.estimator
    estimator.begin(work)
    harness.memory.peak_bytes = harness.memory.active_bytes + size * MIB
    estimator.end(work, num_tokens)


def test_encode_peak_is_attributed_to_tokens_per_call(harness: GovernorHarness):
    """Otherwise the estimate for an image of one tile would be a fraction of the real peak."""
    harness.governor.before_encode(800)
    harness.memory.peak_bytes = harness.memory.active_bytes + 80 * MIB
    harness.governor.after_encode(800, 800, tokens_per_call=80)
    assert harness.governor.estimator.bytes_for("encode", 80) == 80 * MIB
    assert harness.governor.estimator.feature_bytes == 1
    harness.governor.before_encode(800)
    harness.governor.after_encode(800, 800, tokens_per_call=0)
    assert harness.governor.estimator.bytes_for("encode", 80) == 80 * MIB, "nothing was encoded"


def test_pool_is_cleared_before_encode_that_needs_it(harness: GovernorHarness):
    learn(harness, "encode", 200, 200)
    harness.hold(active=500, pool=200)
    harness.governor.before_encode(200)
    assert harness.decisions == {}
    harness.governor.before_encode(201)
    assert harness.decisions == {"clear_guard": 1}


@pytest.mark.parametrize(
    ("policy", "pool", "cleared"),
    [
        ("auto", 300, {}),
        ("auto", 301, {"clear_chunk": 1}),
        ("always", 700, {}),
        ("never", 1, {"clear_chunk": 1}),
    ],
)
def test_pool_is_cleared_between_chunks_by_policy(policy: str, pool: int, cleared: dict[str, int]):
    harness = GovernorHarness(prefill_keep_alloc=policy)
    learn(harness, "prefill", 512, 100)
    harness.hold(active=500, pool=pool)
    harness.governor.before_chunk()
    harness.memory.peak_bytes = 700 * MIB
    harness.governor.after_chunk(512, is_last=False, made_copies=False)
    assert harness.decisions == cleared


def test_pool_is_cleared_after_last_chunk_by_policy():
    harness = GovernorHarness(prefill_keep_alloc="never")
    harness.governor.before_chunk()
    harness.governor.after_chunk(512, is_last=True, made_copies=False)
    assert harness.decisions == {"clear_prefill": 1}


@pytest.mark.parametrize("num_seqs", [1, 16])
def test_pool_check_interval_of_decode_is_in_rows(harness: GovernorHarness, num_seqs: int):
    harness.hold(active=700, pool=139)
    for _ in range(2048 // num_seqs - 1):
        harness.governor.after_decode(num_seqs, awaits_first_token=False)
    assert harness.decisions == {}
    harness.governor.after_decode(num_seqs, awaits_first_token=False)
    assert harness.decisions == {"clear_decode": 1}


def test_decode_clears_pool_near_limit_after_first_tokens(harness: GovernorHarness):
    """A sixteenth of 1000 MiB is 62.5."""
    harness.hold(active=700, pool=137)
    harness.governor.after_decode(5000, awaits_first_token=False)
    harness.hold(active=700, pool=138)
    harness.governor.after_decode(5000, awaits_first_token=True)
    assert harness.decisions == {}
    harness.governor.after_decode(1, awaits_first_token=False)
    assert harness.decisions == {"clear_decode": 1}


def test_failed_allocation_frees_all_unused_memory(harness: GovernorHarness):
    harness.cache("a", 100)
    harness.hold(pool=50)
    harness.governor.free_unused_memory()
    assert (harness.cached, harness.memory.pool_bytes) == (0, 0)
    assert harness.decisions == {"evict": 1, "clear_failure": 1}


# ---- idle --------------------------------------------------------------------------------


def test_idle_time_begins_at_end_of_work(harness: GovernorHarness):
    assert harness.governor.seconds_until_clear() is None, "no work was done yet"
    harness.hold(pool=100)
    harness.governor.mark_busy()
    harness.seconds = 5.0
    assert harness.governor.seconds_until_clear() == 1.0
    harness.seconds = 5.75
    assert harness.governor.seconds_until_clear() == 0.25
    harness.governor.clear_when_idle()
    assert harness.decisions == {"clear_idle": 1}
    assert harness.governor.seconds_until_clear() is None, "once is enough"


def test_new_work_restarts_idle_timer(harness: GovernorHarness):
    harness.governor.mark_busy()
    assert harness.governor.seconds_until_clear() == 1.0
    harness.seconds = 0.9
    harness.governor.mark_busy()
    harness.seconds = 3.0
    assert harness.governor.seconds_until_clear() == 1.0


def test_idle_clear_keeps_small_pool(harness: GovernorHarness):
    harness.hold(pool=32)
    harness.governor.mark_busy()
    harness.governor.clear_when_idle()
    assert harness.decisions == {}
    assert harness.process.num_trims == 1


# ---- estimates ---------------------------------------------------------------------------


def test_estimator_expects_much_before_its_first_measurement(harness: GovernorHarness):
    assert harness.governor.estimator.bytes_for("encode", 100) >= 100 * MIB
    assert harness.governor.estimator.bytes_for("prefill", 100) >= 100 * MIB


def test_estimate_is_peak_of_next_larger_work(harness: GovernorHarness):
    estimator = harness.governor.estimator
    for num_tokens, mib in [(40, 500), (300, 510), (1000, 700), (600, 560)]:
        learn(harness, "encode", num_tokens, mib)
    found = {n: estimator.bytes_for("encode", n) // MIB for n in (20, 40, 41, 600, 601, 1000)}
    assert found == {20: 500, 40: 500, 41: 510, 600: 700, 601: 700, 1000: 700}


def test_estimate_beyond_largest_work_is_proportional(harness: GovernorHarness):
    learn(harness, "encode", 40, 5000)
    learn(harness, "encode", 1000, 700)
    learn(harness, "encode", 600, 540)
    assert harness.governor.estimator.bytes_for("encode", 2000) == 1800 * MIB


def test_estimator_forgets_peaks_after_32_of_their_size(harness: GovernorHarness):
    learn(harness, "encode", 100, 500)
    for _ in range(32):
        assert harness.governor.estimator.bytes_for("encode", 100) == 500 * MIB
        learn(harness, "encode", 100, 10)
        learn(harness, "encode", 200, 10)
    assert harness.governor.estimator.bytes_for("encode", 100) == 10 * MIB


def test_fixed_need_of_short_prompts_does_not_grow_with_others(harness: GovernorHarness):
    """As of quantized weights, which are dequantized for 50 tokens as for 1,000."""
    learn(harness, "prefill", 1000, 5200)
    for _ in range(40):
        learn(harness, "prefill", 50, 5000)
    assert harness.governor.estimator.bytes_for("prefill", 1000) == 5200 * MIB


def test_estimator_ignores_peaks_of_overlapping_work():
    memory = replace(FakeMemory(), active_bytes=100, peak_bytes=0)
    estimator = MemoryEstimator(memory)
    estimator.begin("prefill")
    memory.peak_bytes = 740
    estimator.end("prefill", 64)
    estimator.begin("encode")
    memory.peak_bytes = 90_000
    estimator.begin("prefill")
    memory.peak_bytes = 30_000
    estimator.end("prefill", 64)
    estimator.end("encode", 64)
    assert estimator.bytes_for("prefill", 64) == 640
    assert estimator.bytes_for("encode", 64) == MemoryEstimator(memory).bytes_for("encode", 64)
    assert estimator.peak_bytes == 90_000


def test_estimator_excludes_memory_that_stays_allocated(harness: GovernorHarness):
    """Such as the buffers of a long prompt, or of a restored prefix."""
    estimator = harness.governor.estimator
    estimator.begin("prefill")
    harness.hold(active=600)
    harness.memory.peak_bytes = harness.memory.active_bytes + 20 * MIB
    estimator.end("prefill", 100)
    assert estimator.bytes_for("prefill", 100) == 20 * MIB


def test_estimator_ignores_chunk_that_joined_running_sequences(harness: GovernorHarness):
    learn(harness, "prefill", 100, 10)
    harness.governor.before_chunk()
    harness.memory.peak_bytes = harness.memory.active_bytes + 800 * MIB
    harness.governor.after_chunk(100, is_last=True, made_copies=True)
    assert harness.governor.estimator.bytes_for("prefill", 100) == 10 * MIB


def test_work_of_few_tokens_says_nothing_about_more(harness: GovernorHarness):
    estimator = harness.governor.estimator
    before = estimator.bytes_for("prefill", 100)
    learn(harness, "prefill", 3, 1)
    assert estimator.bytes_for("prefill", 100) == before
    assert estimator.bytes_for("prefill", 3) == MIB
    learn(harness, "prefill", 1000, 900)
    assert estimator.bytes_for("prefill", 100) == 900 * MIB
    assert estimator.bytes_for("prefill", 3) == MIB


def test_request_without_media_needs_no_encode(harness: GovernorHarness):
    learn(harness, "encode", 4096, 3000)
    assert harness.governor.estimator.bytes_for("encode", 0) == 0


# ---- commands of the front ---------------------------------------------------------------


def test_smaller_limit_evicts_excess_entries_and_clears_pool(harness: GovernorHarness) -> None:
    harness.cache("a", 200)
    harness.cache("b", 100)
    harness.hold(active=100, pool=200)
    harness.governor.set_limit(1100 * MIB, 0)
    assert (harness.cached, harness.decisions) == (300, {})
    harness.governor.set_limit(400 * MIB, 0)
    harness._settle()
    assert harness.cached == 100
    assert harness.memory.pool_bytes == 0
    assert harness.decisions == {"evict": 1, "clear_limit": 1}
    assert harness.governor.stats().limit_bytes == 400 * MIB


def test_smaller_limit_keeps_reserved_bytes(harness: GovernorHarness) -> None:
    harness.cache("a", 200)
    harness.hold(active=100)
    harness.governor.set_limit(450 * MIB, 100 * MIB)
    harness._settle()
    assert harness.cached == 0  # of 450 MiB: 100 of weights, 100 held, 100 reserved, 150 left
    assert harness.governor.stats(100 * MIB).reserved_bytes == 100 * MIB


def test_requests_are_admitted_by_new_limit(harness: GovernorHarness) -> None:
    assert harness.admit(800) == "admit"
    harness.governor.set_limit(500 * MIB, 0)
    assert harness.admit(800) == "refuse"
    assert harness.admit(300) == "admit"
    harness.governor.set_limit(1000 * MIB, 0)
    assert harness.admit(800) == "admit"


def test_clear_caches_drops_unused_entries_and_pool(harness: GovernorHarness) -> None:
    harness.cache("a", 200)
    harness.hold(pool=10)
    harness.governor.clear_caches()
    assert (harness.cached, harness.memory.pool_bytes) == (0, 0)
    assert harness.decisions == {"clear_operator": 1}
