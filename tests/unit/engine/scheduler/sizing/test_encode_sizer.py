"""The size of encode batches grows as long as that saves time, on any device."""

from __future__ import annotations

from collections.abc import Callable

from vlm_server.engine.scheduler.sizing.encode_sizer import EncodeSizer

Device = Callable[[int], float]

TOKENS = 1000
FEW_TOKENS = 256


def gpu(count: int) -> float:
    """One image does not fill it, eight do: as measured on an H200."""
    return 0.012 + 0.014 * count


def cpu(count: int) -> float:
    return 0.05 * count


def counts(
    device: Device, times: int = 12, waiting: int = 8, most: int = 8, max_seconds: float = 1.0
) -> list[int]:
    """The sizes of encode batches while so many images always wait, by seconds per size."""
    sizer, batch_sizes = EncodeSizer(most), []
    for _ in range(times):
        batch_sizes.append(sizer.choose_num_images(TOKENS, waiting, max_seconds))
        sizer.record(TOKENS, batch_sizes[-1], device(batch_sizes[-1]))
    return batch_sizes


def test_encode_batch_doubles_while_that_saves_time():
    assert counts(gpu) == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 8, 8]


def test_useless_encode_batch_is_tried_twice_and_again_later():
    batch_sizes = counts(cpu, times=300)
    assert batch_sizes[:6] == [1, 1, 2, 2, 1, 1]
    assert max(batch_sizes) == 2
    assert batch_sizes.count(2) < 300 / 20


def test_encode_batch_stops_growing_at_best_size():
    assert counts(lambda count: 0.01 * max(count, 2))[-4:] == [2] * 4


def test_slow_first_encode_does_not_shrink_batch():
    """Kernels are compiled, or attention is planned, for each new shape."""
    known_counts: set[int] = set()

    def compiles(count: int) -> float:
        slow = 0.5 if count not in known_counts else 0.0
        known_counts.add(count)
        return slow + gpu(count)

    assert counts(compiles)[-1] == 8


def test_encode_batch_is_limited_by_waiting_images_and_setting():
    assert set(counts(gpu, waiting=1)) == {1}
    assert max(counts(gpu, waiting=7)) == 4
    assert max(counts(gpu, waiting=3)) == 2
    assert max(counts(gpu, most=2)) == 2
    assert set(counts(gpu, most=1)) == {1}


def test_encode_batch_respects_max_seconds():
    assert max(counts(gpu, max_seconds=0.09)) == 4
    assert set(counts(gpu, max_seconds=0.05)) == {1}, "without any gain, two would last longer"


def test_encode_times_are_measured_per_image_size():
    sizer = EncodeSizer(8)
    for count in counts(gpu):
        sizer.record(TOKENS, count, gpu(count))
    assert sizer.choose_num_images(TOKENS - 100, 8, 1.0) == 8
    assert sizer.choose_num_images(TOKENS * 4, 8, 1.0) == 1
    assert sizer.choose_num_images(TOKENS // 4, 8, 1.0) == 1


def test_two_images_may_pair_if_they_take_one_images_time():
    def is_as_one(device: Device, max_seconds: float = 1.0) -> bool:
        sizer = EncodeSizer(8)
        for count in (1, 1, 2, 2):
            sizer.record(FEW_TOKENS, count, device(count))
        return sizer.may_pair(FEW_TOKENS, max_seconds)

    assert is_as_one(lambda count: 0.01 + 0.0005 * count)
    assert not is_as_one(gpu)
    assert not is_as_one(cpu)
    assert not is_as_one(lambda count: 0.01, max_seconds=0.005)


def test_pairing_of_images_is_tried_at_most_twice():
    sizer, tried = EncodeSizer(8), 0
    for _ in range(60):
        is_tried = sizer.may_pair(FEW_TOKENS, 1.0)
        tried += is_tried
        sizer.record(FEW_TOKENS, 1 + is_tried, gpu(1 + is_tried))
    assert tried == 2


def test_two_large_images_are_never_paired():
    sizer = EncodeSizer(8)
    for count in (1, 1, 2, 2):
        sizer.record(257, count, 0.01)
    assert sizer.choose_num_images(257, 2, 1.0) == 2
    assert not sizer.may_pair(257, 1.0)
