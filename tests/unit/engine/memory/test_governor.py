"""What the governor decides, by a memory that holds what the test says."""

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


class Ground:
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
        """So much beside the weights and the cache."""
        self._held = active
        self.memory.pool_bytes = pool * MIB
        self._settle()

    def cache(self, name: str, size: int) -> None:
        """Something that no request uses."""
        self.caches.features.put(name, _Features(), size * MIB).release()
        self._settle()

    def admit(self, resident: int, transient: int = 0, reserved: int = 0, **who: bool) -> str:
        """By default nobody else runs."""
        who = {"others_run": False, **who}
        if not self.governor.fits_alone(resident * MIB):
            return "refuse"
        needed = (resident + transient) * MIB
        return "admit" if self.governor.make_room(needed, reserved * MIB, **who) else "wait"

    def _settle(self) -> None:
        cached = self.caches.features.read().size_bytes
        self.memory.active_bytes = (WEIGHTS + self._held) * MIB + cached

    @property
    def cached(self) -> int:
        return self.caches.features.read().size_bytes // MIB

    @property
    def decisions(self) -> dict[str, int]:
        return {kind: count for kind, count in self.governor.read().decisions.items() if count}


@pytest.fixture
def ground() -> Ground:
    return Ground()


# ---- admission ---------------------------------------------------------------------------


def test_fitting_request_is_admitted(ground: Ground):
    assert ground.admit(800, 100) == "admit"
    assert ground.decisions == {}


def test_request_waits_if_only_reserved_bytes_are_free(ground: Ground):
    ground.hold(active=300)
    assert ground.admit(300, 100, reserved=200, others_run=True) == "admit"
    assert ground.admit(300, 101, reserved=200, others_run=True) == "wait"


def test_admission_evicts_oldest_cache_entries_as_needed(ground: Ground):
    for name in ("oldest", "middle", "newest"):
        ground.cache(name, 150)
    ground.admit(600, others_run=True)
    assert ground.cached == 300
    assert "oldest" not in ground.caches.features
    assert ground.decisions["evict"] == 1


def test_leased_features_are_not_evicted(ground: Ground):
    ground.cache("in use", 400)
    lease = ground.caches.features.lease("in use")
    assert ground.admit(600, others_run=True) == "wait"
    assert lease is not None
    lease.release()
    ground.admit(600, others_run=True)
    assert ground.cached == 0


def test_request_larger_than_the_limit_is_refused(ground: Ground):
    assert ground.admit(901) == "refuse"
    ground.hold(active=500)
    assert ground.admit(901, others_run=True) == "refuse"


def test_learned_transient_bytes_never_refuse_a_request(ground: Ground):
    assert ground.admit(100, 5000, others_run=True) == "wait"
    assert ground.admit(100, 5000) == "admit"


def test_request_waits_for_ending_requests_before_eviction(ground: Ground):
    ground.cache("a", 400)
    ground.hold(active=450)
    assert ground.admit(300, others_run=True, some_are_ending=True) == "wait"
    assert ground.cached == 400
    ground.hold(active=0)
    assert ground.admit(300) == "admit"
    assert ground.cached == 400


def test_admission_synchronizes_before_it_evicts(ground: Ground):
    ground.cache("a", 400)
    ground.hold(active=300)
    ground.memory.unsettled_bytes = 300 * MIB
    assert ground.admit(400, others_run=True) == "admit"
    assert ground.cached == 400
    assert ground.decisions == {}


def test_reserved_bytes_evict_newer_cache_entries(ground: Ground):
    """What was cached since then lies where a row will grow."""
    ground.cache("old", 150)
    ground.cache("new", 150)
    ground.hold(active=200)
    ground.governor.make_room_for_reserved(400 * MIB)
    assert ground.cached == 300
    ground.hold(active=350)
    ground.governor.make_room_for_reserved(400 * MIB)
    assert (ground.cached, "old" in ground.caches.features) == (150, False)
    assert ground.decisions == {"evict": 1}


def test_make_room_for_reserved_synchronizes_in_at_most_every_eighth_step(ground: Ground):
    """A decode step holds memory while it runs: settling in each would cost all their overlap."""
    ground.cache("a", 100)
    ground.hold(active=700)
    settled = 0

    def step() -> None:
        nonlocal settled
        ground.memory.active_bytes += 60 * MIB
        ground.memory.unsettled_bytes = 60 * MIB
        ground.governor.make_room_for_reserved(90 * MIB)
        settled += not ground.memory.unsettled_bytes
        ground.memory.synchronize()

    for _ in range(60):
        step()
    assert 1 <= settled <= 8
    assert ground.cached == 100
    assert ground.decisions == {}


def test_shortage_explained_by_launched_work_is_checked_again_after_eight_steps(ground: Ground):
    """The same shortage may come of what grew, with nothing under way."""
    ground.cache("a", 100)
    ground.hold(active=740)
    ground.memory.unsettled_bytes = 60 * MIB
    ground.governor.make_room_for_reserved(90 * MIB)
    assert ground.cached == 100
    ground.hold(active=740)
    for _ in range(8):
        ground.governor.make_room_for_reserved(90 * MIB)
    assert ground.cached == 0


def test_shortage_beyond_launched_work_evicts_at_once(ground: Ground):
    ground.cache("a", 100)
    ground.hold(active=740)
    ground.memory.unsettled_bytes = 10 * MIB
    ground.governor.make_room_for_reserved(65 * MIB)
    assert ground.cached == 100
    ground.governor.make_room_for_reserved(90 * MIB)
    assert ground.cached == 0


def test_empty_eviction_is_not_counted(ground: Ground):
    ground.governor.free_unused_memory()
    assert ground.decisions == {"clear_failure": 1}


def test_admission_recovers_from_pressure_of_other_programs(ground: Ground):
    """Somebody else took the memory and gives it back; in between, who could fit waits or runs."""
    ground.hold(active=850)
    assert ground.admit(300, others_run=True) == "wait"
    assert ground.admit(300) == "admit", "nobody else's end can be waited for"
    ground.hold(active=100)
    assert ground.admit(300, others_run=True) == "admit"


def test_pool_is_cleared_only_if_admission_needs_its_bytes(ground: Ground):
    ground.hold(pool=190)
    assert ground.admit(600) == "admit"
    assert ground.memory.pool_bytes == 190 * MIB
    assert ground.admit(720) == "admit"
    assert ground.memory.pool_bytes == 0
    assert ground.decisions == {"clear_admission": 1}


def test_self_trimming_pool_is_cleared_only_for_encodes():
    ground = Ground(prefill_keep_alloc="auto")
    ground.memory.trims_own_pool = True
    learn(ground, "prefill", 512, 100)
    learn(ground, "encode", 400, 400)
    ground.hold(active=500, pool=350)
    assert ground.admit(300) == "admit"
    ground.governor.before_chunk()
    ground.governor.after_chunk(512, is_last=False, joined_running=False)
    assert ground.decisions == {}
    ground.governor.before_encode(200)
    assert ground.decisions == {"clear_guard": 1}


# ---- while anybody is served -------------------------------------------------------------


GIB = 1024


def gpu(**settings: object) -> Ground:
    """A device of 139 GiB, as a program of its own may use it, with weights of 6 GiB."""
    ground = Ground(**settings)
    memory = ground.memory
    memory.trims_own_pool = True
    memory.limit_bytes = 125 * GIB * MIB
    memory.used_bytes = 40 * GIB * MIB
    ground.hold(active=10 * GIB, pool=12 * GIB)
    return ground


def serve(ground: Ground, seconds: int) -> None:
    """Eight users' streams with new images, at 40 steps a second; statistics every second."""
    governor = ground.governor
    needed = (60 + 6 * GIB) * MIB
    for _ in range(seconds):
        ground.seconds += 1.0
        governor.mark_busy()
        governor.make_room(needed, GIB * MIB, others_run=True)
        governor.before_encode(1131)
        governor.after_encode(1131, 5 * MIB, tokens_per_call=1131)
        governor.before_chunk()
        governor.after_chunk(1200, is_last=True, joined_running=True)
        for _ in range(40):
            governor.make_room_for_reserved(GIB * MIB)
            governor.after_decode(8, awaits_first_token=False)
        governor.read()


def test_pool_is_never_cleared_with_ample_memory():
    """The pool holds 12 GiB, which 100 more are left beside."""
    ground = gpu()
    learn(ground, "encode", 256, 2 * GIB)
    serve(ground, 600)
    assert ground.decisions == {}
    assert ground.process.num_trims == 0


def test_driver_is_polled_at_most_every_five_seconds():
    """Asking it takes time between two steps."""
    ground = gpu()
    serve(ground, 100)
    assert 20 <= ground.memory.num_driver_calls <= 21


def test_pool_is_cleared_once_per_driver_report_of_shortage():
    """In any step, be there answers or a prompt alone; until it says so again."""
    ground = gpu()
    ground.memory.others_need_some = True
    ground.governor.read()
    for _ in range(3):
        ground.hold(active=10 * GIB, pool=GIB)
        ground.governor.after_decode(0, awaits_first_token=True)
    assert ground.decisions == {"clear_others": 1}
    ground.seconds += 5.0
    ground.governor.read()
    ground.governor.after_decode(0, awaits_first_token=True)
    assert ground.decisions == {"clear_others": 2}


@pytest.mark.parametrize(("needed", "pool"), [(False, 12 * GIB), (True, 32)])
def test_pool_is_kept_without_need_or_if_small(needed: bool, pool: int):
    ground = gpu()
    ground.memory.others_need_some = needed
    ground.hold(active=10 * GIB, pool=pool)
    serve(ground, 20)
    assert ground.decisions == {}


def test_caches_are_halved_once_the_pool_is_empty():
    """As long as the system is short of memory, every five seconds."""
    ground = gpu()
    ground.hold(active=10 * GIB, pool=0)
    for number in range(16):
        ground.cache(f"{number}", 1)
    ground.memory.others_need_some = True
    for left in (8, 4):
        ground.seconds += 5.0
        ground.governor.read()
        ground.governor.give_back_to_other_programs()
        assert ground.cached == left
        ground.governor.give_back_to_other_programs()
        assert ground.cached == left, "it was not asked again"


def test_shared_memory_is_polled_while_idle():
    """If there is anything to give."""
    ground = gpu()
    ground.seconds += 5.0
    ground.governor.read()
    assert ground.governor.seconds_until_poll() is None, "other programs have memory of their own"
    ground.memory.is_shared = True
    assert ground.governor.seconds_until_poll() == 5.0
    ground.seconds += 4.0
    assert ground.governor.seconds_until_poll() == 1.0
    ground.seconds += 1.0
    ground.memory.others_need_some = True
    ground.governor.read()
    assert ground.governor.seconds_until_poll() == 0.0
    ground.governor.give_back_to_other_programs()
    assert ground.governor.seconds_until_poll() is None, "the pool was all"


def test_untrimmed_pool_is_cleared_only_near_the_limit(ground: Ground):
    """With ample memory the pool's own limit bounds it."""
    ground.memory.limit_bytes = 12 * GIB * MIB
    learn(ground, "encode", 256, 500)
    ground.hold(active=500, pool=256)
    serve(ground, 60)
    assert ground.decisions == {}
    ground.memory.limit_bytes = 900 * MIB
    ground.governor.after_decode(2048, awaits_first_token=False)
    assert ground.decisions == {"clear_decode": 1}


# ---- around what takes much --------------------------------------------------------------


def learn(ground: Ground, work: Literal["encode", "prefill"], num_tokens: int, size: int) -> None:
    """A piece of work at whose worst moment so much more was held. Clears nothing."""
    estimator = ground.governor.estimator
    estimator.begin(work)
    ground.memory.peak_bytes = ground.memory.active_bytes + size * MIB
    estimator.end(work, num_tokens)


def test_encode_peak_is_attributed_to_tokens_per_call(ground: Ground):
    """Or a picture of a single tile would be thought to take a fraction of it."""
    ground.governor.before_encode(800)
    ground.memory.peak_bytes = ground.memory.active_bytes + 80 * MIB
    ground.governor.after_encode(800, 800, tokens_per_call=80)
    assert ground.governor.estimator.bytes_for("encode", 80) == 80 * MIB
    assert ground.governor.estimator.feature_bytes == 1
    ground.governor.before_encode(800)
    ground.governor.after_encode(800, 800, tokens_per_call=0)
    assert ground.governor.estimator.bytes_for("encode", 80) == 80 * MIB, "nothing was encoded"


def test_pool_is_cleared_before_an_encode_that_needs_it(ground: Ground):
    learn(ground, "encode", 400, 400)
    ground.hold(active=500, pool=200)
    ground.governor.before_encode(200)
    assert ground.decisions == {}
    ground.governor.before_encode(201)
    assert ground.decisions == {"clear_guard": 1}


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
    ground = Ground(prefill_keep_alloc=policy)
    learn(ground, "prefill", 512, 100)
    ground.hold(active=500, pool=pool)
    ground.governor.before_chunk()
    ground.memory.peak_bytes = 700 * MIB
    ground.governor.after_chunk(512, is_last=False, joined_running=False)
    assert ground.decisions == cleared


def test_pool_is_cleared_after_the_last_chunk_by_policy():
    ground = Ground(prefill_keep_alloc="never")
    ground.governor.before_chunk()
    ground.governor.after_chunk(512, is_last=True, joined_running=False)
    assert ground.decisions == {"clear_prefill": 1}


@pytest.mark.parametrize("num_seqs", [1, 16])
def test_pool_check_interval_of_decode_is_in_rows(ground: Ground, num_seqs: int):
    ground.hold(active=700, pool=139)
    for _ in range(2048 // num_seqs - 1):
        ground.governor.after_decode(num_seqs, awaits_first_token=False)
    assert ground.decisions == {}
    ground.governor.after_decode(num_seqs, awaits_first_token=False)
    assert ground.decisions == {"clear_decode": 1}


def test_decode_clears_pool_near_limit_after_first_tokens(ground: Ground):
    """A sixteenth of 1000 MiB is 62.5."""
    ground.hold(active=700, pool=137)
    ground.governor.after_decode(5000, awaits_first_token=False)
    ground.hold(active=700, pool=138)
    ground.governor.after_decode(5000, awaits_first_token=True)
    assert ground.decisions == {}
    ground.governor.after_decode(1, awaits_first_token=False)
    assert ground.decisions == {"clear_decode": 1}


def test_failed_allocation_frees_all_unused_memory(ground: Ground):
    ground.cache("a", 100)
    ground.hold(pool=50)
    ground.governor.free_unused_memory()
    assert (ground.cached, ground.memory.pool_bytes) == (0, 0)
    assert ground.decisions == {"evict": 1, "clear_failure": 1}


# ---- idle --------------------------------------------------------------------------------


def test_idle_time_begins_at_the_end_of_work(ground: Ground):
    assert ground.governor.seconds_until_clear() is None, "nothing was done yet"
    ground.hold(pool=100)
    ground.governor.mark_busy()
    ground.seconds = 5.0
    assert ground.governor.seconds_until_clear() == 1.0
    ground.seconds = 5.75
    assert ground.governor.seconds_until_clear() == 0.25
    ground.governor.clear_when_idle()
    assert ground.decisions == {"clear_idle": 1}
    assert ground.governor.seconds_until_clear() is None, "once is enough"


def test_new_request_cancels_the_idle_clear(ground: Ground):
    ground.governor.mark_busy()
    assert ground.governor.seconds_until_clear() == 1.0
    ground.seconds = 0.9
    ground.governor.mark_busy()
    ground.seconds = 3.0
    assert ground.governor.seconds_until_clear() == 1.0


def test_idle_clear_keeps_a_small_pool(ground: Ground):
    ground.hold(pool=32)
    ground.governor.mark_busy()
    ground.governor.clear_when_idle()
    assert ground.decisions == {}
    assert ground.process.num_trims == 1


# ---- costs -------------------------------------------------------------------------------


def test_estimator_expects_much_before_its_first_measurement(ground: Ground):
    assert ground.governor.estimator.bytes_for("encode", 100) >= 100 * MIB
    assert ground.governor.estimator.bytes_for("prefill", 100) >= 100 * MIB


def test_estimator_uses_the_highest_bytes_per_token(ground: Ground):
    learn(ground, "encode", 100, 50)
    learn(ground, "encode", 200, 40)
    assert ground.governor.estimator.bytes_for("encode", 40) == 20 * MIB
    assert ground.governor.estimator.bytes_for("encode", 200) == 100 * MIB
    assert ground.governor.estimator.bytes_for("encode", 400) == 200 * MIB


def test_estimator_forgets_peaks_after_32_measurements(ground: Ground):
    learn(ground, "encode", 100, 500)
    for _ in range(32):
        learn(ground, "encode", 100, 10)
    assert ground.governor.estimator.bytes_for("encode", 100) == 10 * MIB


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


def test_estimator_excludes_memory_that_stays_allocated(ground: Ground):
    """A long prompt's buffers, or those of a prefix that was found."""
    estimator = ground.governor.estimator
    estimator.begin("prefill")
    ground.hold(active=600)
    ground.memory.peak_bytes = ground.memory.active_bytes + 20 * MIB
    estimator.end("prefill", 100)
    assert estimator.bytes_for("prefill", 100) == 20 * MIB


def test_estimator_ignores_chunk_that_joined_running_sequences(ground: Ground):
    learn(ground, "prefill", 100, 10)
    ground.governor.before_chunk()
    ground.memory.peak_bytes = ground.memory.active_bytes + 800 * MIB
    ground.governor.after_chunk(100, is_last=True, joined_running=True)
    assert ground.governor.estimator.bytes_for("prefill", 100) == 10 * MIB


def test_estimator_ignores_work_of_few_tokens(ground: Ground):
    before = ground.governor.estimator.bytes_for("prefill", 100)
    learn(ground, "prefill", 3, 1)
    assert ground.governor.estimator.bytes_for("prefill", 100) == before


# ---- what the front decides ----------------------------------------------------------------


def test_smaller_limit_evicts_excess_entries_and_clears_pool(ground: Ground) -> None:
    ground.cache("a", 200)
    ground.cache("b", 100)
    ground.hold(active=100, pool=200)
    ground.governor.set_limit(1100 * MIB, 0)
    assert (ground.cached, ground.decisions) == (300, {})
    ground.governor.set_limit(400 * MIB, 0)
    ground._settle()
    assert ground.cached == 100
    assert ground.memory.pool_bytes == 0
    assert ground.decisions == {"evict": 1, "clear_limit": 1}
    assert ground.governor.read().limit_bytes == 400 * MIB


def test_smaller_limit_keeps_reserved_bytes(ground: Ground) -> None:
    ground.cache("a", 200)
    ground.hold(active=100)
    ground.governor.set_limit(450 * MIB, 100 * MIB)
    ground._settle()
    assert ground.cached == 0  # 100 for the weights, 100 held, 100 promised, 150 are left
    assert ground.governor.read(100 * MIB).reserved_bytes == 100 * MIB


def test_requests_are_admitted_by_the_new_limit(ground: Ground) -> None:
    assert ground.admit(800) == "admit"
    ground.governor.set_limit(500 * MIB, 0)
    assert ground.admit(800) == "refuse"
    assert ground.admit(300) == "admit"
    ground.governor.set_limit(1000 * MIB, 0)
    assert ground.admit(800) == "admit"


def test_clear_caches_drops_unused_entries_and_pool(ground: Ground) -> None:
    ground.cache("a", 200)
    ground.hold(pool=10)
    ground.governor.clear_caches()
    assert (ground.cached, ground.memory.pool_bytes) == (0, 0)
    assert ground.decisions == {"clear_operator": 1}
