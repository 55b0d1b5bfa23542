"""Crashes blame loads on the device; those of many crashes are refused."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock
from tests.unit.supervisor.requests import LONG, SCREENSHOT, ask
from vlm_server.errors import RequestTooCostly
from vlm_server.protocol import Finished, OnDevice, Submit, Usage
from vlm_server.supervisor.engine_streams import EngineStreams
from vlm_server.supervisor.quarantine import Quarantine
from vlm_server.supervisor.shape import shape_of

SECONDS = 600.0
LARGE = ask("large", "", SCREENSHOT)
SAME = ask("same", "", (1900, 1100))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quarantine(clock: Clock) -> Quarantine:
    return Quarantine(SECONDS, clock)


def admit(quarantine: Quarantine, submit: Submit) -> None:
    quarantine.admit(submit.request_id, shape_of(submit))


def crash(quarantine: Quarantine, encoding: Submit, *others: Submit) -> None:
    """An engine dies that encodes the media of one request and prefills the other prompts."""
    for submit in (encoding, *others):
        admit(quarantine, submit)
    prefilling = tuple(submit.request_id for submit in others)
    quarantine.record_work(OnDevice(prefilling, encoding=(encoding.request_id,)))
    quarantine.record_engine_end(is_crash=True)


def crash_of_prompts(quarantine: Quarantine, *submits: Submit) -> None:
    for submit in submits:
        admit(quarantine, submit)
    quarantine.record_work(OnDevice(tuple(submit.request_id for submit in submits)))
    quarantine.record_engine_end(is_crash=True)


def succeed(quarantine: Quarantine, submit: Submit) -> None:
    """Report that the request passed both phases, and then a token."""
    admit(quarantine, submit)
    quarantine.record_work(OnDevice(encoding=(submit.request_id,)))
    quarantine.record_work(OnDevice((submit.request_id,)))
    quarantine.record_success(submit.request_id)


def is_suspect(quarantine: Quarantine, submit: Submit) -> bool:
    """Whether a load of the request has crashed two engines."""
    records = map(quarantine._records.get, shape_of(submit).loads)
    return any(record.num_crashes > 1 for record in records if record)


def is_refused(quarantine: Quarantine, submit: Submit) -> bool:
    try:
        quarantine.check(shape_of(submit))
    except RequestTooCostly:
        return True
    return False


def condemn(quarantine: Quarantine, submit: Submit) -> None:
    for _ in range(3):
        crash(quarantine, submit)


# ---- suspects ------------------------------------------------------------------------


def test_second_crash_makes_load_suspect_but_not_refused(quarantine: Quarantine) -> None:
    crash(quarantine, LARGE)
    assert not is_suspect(quarantine, SAME)
    crash(quarantine, LARGE)
    assert is_suspect(quarantine, SAME)
    assert not is_refused(quarantine, SAME)
    assert quarantine.num_shapes == quarantine.num_refused == 0
    assert not is_suspect(quarantine, ask("other", "", (640, 480)))


def test_successful_suspect_is_cleared_of_all_crashes(quarantine: Quarantine) -> None:
    crash(quarantine, LARGE)
    crash(quarantine, LARGE)
    succeed(quarantine, SAME)
    assert not is_suspect(quarantine, LARGE)
    crash(quarantine, LARGE)
    assert not is_suspect(quarantine, LARGE)


def test_success_between_crashes_clears_load(quarantine: Quarantine) -> None:
    for _ in range(5):
        crash(quarantine, LARGE)
        succeed(quarantine, SAME)
    assert not is_suspect(quarantine, LARGE)


def test_success_with_cached_image_does_not_clear_encode_load(
    quarantine: Quarantine,
) -> None:
    crash(quarantine, LARGE)
    crash(quarantine, LARGE)
    admit(quarantine, SAME)
    quarantine.record_work(OnDevice(("same",)))
    quarantine.record_success("same")
    assert is_suspect(quarantine, LARGE)


def test_crash_blames_phase_of_request(quarantine: Quarantine) -> None:
    """The image was encoded and is no suspect; the prompt is one."""
    screenshots = ask("many", "", *[SCREENSHOT] * 20)
    crash_of_prompts(quarantine, screenshots)
    crash_of_prompts(quarantine, screenshots)
    assert is_suspect(quarantine, screenshots)
    assert not is_suspect(quarantine, LARGE)


def test_disk_read_and_prefill_of_prompt_are_different_loads(quarantine: Quarantine) -> None:
    """A prefill clears no disk read, and crashes of both do not add up."""
    for phase in ("reading", "prefilling"):
        admit(quarantine, LARGE)
        quarantine.record_work(OnDevice(**{phase: ("large",)}))
        quarantine.record_engine_end(is_crash=True)
    assert not is_suspect(quarantine, LARGE)
    admit(quarantine, LARGE)
    quarantine.record_work(OnDevice(reading=("large",)))
    quarantine.record_engine_end(is_crash=True)
    assert is_suspect(quarantine, LARGE)
    succeed(quarantine, SAME)
    assert is_suspect(quarantine, LARGE)


def test_images_of_different_aspect_are_different_loads(quarantine: Quarantine) -> None:
    panorama = ask("panorama", "", (46_000, 45))
    crash(quarantine, panorama)
    crash(quarantine, panorama)
    assert is_suspect(quarantine, panorama)
    assert not is_suspect(quarantine, LARGE)


def test_hung_encoder_is_blamed_alone(quarantine: Quarantine) -> None:
    for _ in range(2):
        admit(quarantine, LARGE)
        admit(quarantine, ask("text", LONG))
        quarantine.record_work(OnDevice(("text",), ("large",)))
        quarantine.record_engine_end(is_crash=True, only_encoder=True)
    assert is_suspect(quarantine, LARGE)
    assert not is_suspect(quarantine, ask("b", LONG))


def test_small_text_is_never_suspect(quarantine: Quarantine) -> None:
    for _ in range(5):
        crash_of_prompts(quarantine, ask("a", "Hello"))
    assert not is_suspect(quarantine, ask("b", "Hello"))
    assert not is_refused(quarantine, ask("b", "Hello"))


# ---- refusals ------------------------------------------------------------------------


def test_condemned_load_is_refused_with_advice_and_retry_time(
    quarantine: Quarantine, clock: Clock
) -> None:
    condemn(quarantine, LARGE)
    clock.now += 100
    with pytest.raises(RequestTooCostly) as caught:
        quarantine.check(shape_of(SAME))
    assert caught.value.retry_after_seconds == SECONDS - 100
    assert "2048 x 1024 pixels" in caught.value.message
    assert "smaller images" in caught.value.message
    assert "500 seconds" in caught.value.message
    assert "video" not in caught.value.message
    assert (quarantine.num_shapes, quarantine.num_refused) == (1, 1)
    assert not is_refused(quarantine, ask("d", "", (640, 480)))


def test_third_crash_beside_other_load_refuses_neither_until_one_is_alone(
    quarantine: Quarantine,
) -> None:
    other = ask("other", LONG)
    for _ in range(4):
        crash(quarantine, LARGE, other)
        assert not is_refused(quarantine, LARGE)
        assert not is_refused(quarantine, other)
    crash(quarantine, LARGE)
    assert is_refused(quarantine, LARGE)
    assert not is_refused(quarantine, other)


@pytest.mark.parametrize("restart_seconds", [0.0, 125.0, 2 * SECONDS])
def test_number_of_crashes_beside_other_loads_is_bounded(
    quarantine: Quarantine, clock: Clock, restart_seconds: float
) -> None:
    for number in range(6):
        clock.now += restart_seconds
        assert not is_refused(quarantine, LARGE)
        crash(quarantine, LARGE, ask("other", LONG + " " * 20_000 * number))
    assert is_refused(quarantine, LARGE)


def test_crash_beside_decoding_sequences_refuses_no_load_until_one_is_alone(
    quarantine: Quarantine,
) -> None:
    for _ in range(4):
        admit(quarantine, LARGE)
        quarantine.record_work(OnDevice(("large",), is_decoding=True))
        quarantine.record_engine_end(is_crash=True)
        assert not is_refused(quarantine, LARGE)
    crash_of_prompts(quarantine, LARGE)
    assert is_refused(quarantine, LARGE)


def test_crash_beside_small_text_refuses_no_load_until_one_is_alone(
    quarantine: Quarantine,
) -> None:
    for _ in range(4):
        crash(quarantine, LARGE, ask("text", "Hello"))
        assert not is_refused(quarantine, LARGE)
    crash(quarantine, LARGE)
    assert is_refused(quarantine, LARGE)


def test_image_of_hung_encoder_is_alone_beside_prompts(quarantine: Quarantine) -> None:
    for _ in range(3):
        assert not is_refused(quarantine, LARGE)
        admit(quarantine, LARGE)
        quarantine.record_work(OnDevice(("text",), ("large",)))
        quarantine.record_engine_end(is_crash=True, only_encoder=True)
    assert is_refused(quarantine, LARGE)


def test_crash_before_work_begins_condemns_no_load(quarantine: Quarantine) -> None:
    crash(quarantine, LARGE)
    crash(quarantine, LARGE)
    admit(quarantine, LARGE)
    quarantine.record_engine_end(is_crash=True)
    assert not is_refused(quarantine, LARGE)


def test_expired_refusal_ends_until_next_crash(quarantine: Quarantine, clock: Clock) -> None:
    condemn(quarantine, LARGE)
    clock.now += SECONDS - 1
    assert is_refused(quarantine, LARGE)
    clock.now += 1
    assert not is_refused(quarantine, LARGE)
    assert quarantine.num_shapes == 0
    crash(quarantine, LARGE)
    assert is_refused(quarantine, LARGE)


def test_success_after_refusal_clears_load(quarantine: Quarantine, clock: Clock) -> None:
    condemn(quarantine, LARGE)
    clock.now += SECONDS
    succeed(quarantine, SAME)
    crash(quarantine, LARGE)
    assert not is_suspect(quarantine, LARGE)
    assert not is_refused(quarantine, LARGE)


# ---- blame ---------------------------------------------------------------------------


def test_requests_of_equal_load_count_one_crash_together(quarantine: Quarantine) -> None:
    crash_of_prompts(quarantine, ask("a", LONG), ask("b", LONG))
    assert not is_suspect(quarantine, ask("c", LONG))


def test_batched_encode_crash_blames_all_its_images(quarantine: Quarantine) -> None:
    screenshot, photo = ask("one", "", (1900, 1100)), ask("other", "", (800, 3000))
    for _ in range(2):
        for submit in (screenshot, photo):
            admit(quarantine, submit)
        quarantine.record_work(OnDevice(encoding=("one", "other")))
        quarantine.record_engine_end(is_crash=True)
    assert is_suspect(quarantine, screenshot)
    assert is_suspect(quarantine, photo)


def test_crash_blames_only_loads_on_device(quarantine: Quarantine) -> None:
    names = ["waiting", "answered", "past", "failed", "culprit"]
    sizes = [(64, 64), (128, 128), (256, 256), (512, 512), (4096, 4096)]
    submits = [ask(name, "", size) for name, size in zip(names, sizes, strict=True)]
    for _ in range(2):
        for submit in submits:
            admit(quarantine, submit)
        quarantine.record_work(OnDevice(encoding=("past",)))
        quarantine.record_work(OnDevice(("answered", "failed"), ("culprit",)))
        quarantine.record_success("answered")
        quarantine.remove("answered")
        quarantine.acquit("failed")
        quarantine.record_engine_end(is_crash=True)
    assert [is_suspect(quarantine, submit) for submit in submits] == [False] * 4 + [True]


def test_aborted_image_still_under_encode_is_blamed(quarantine: Quarantine) -> None:
    """The encoder continues an aborted image while other prompts are prefilled."""
    for _ in range(2):
        admit(quarantine, LARGE)
        quarantine.record_work(OnDevice(encoding=("large",)))
        quarantine.remove("large")
        assert quarantine.num_tracked == 0
        quarantine.record_work(OnDevice(("text",), ("large",)))
        quarantine.record_engine_end(is_crash=True)
    assert is_suspect(quarantine, LARGE)


def test_aborted_image_is_not_blamed_for_later_work(quarantine: Quarantine) -> None:
    for _ in range(2):
        admit(quarantine, LARGE)
        quarantine.record_work(OnDevice(encoding=("large",)))
        quarantine.remove("large")
        crash_of_prompts(quarantine, ask("b", LONG))
    assert not is_suspect(quarantine, SAME)


def test_intended_engine_end_is_no_crash(quarantine: Quarantine) -> None:
    for _ in range(3):
        admit(quarantine, LARGE)
        quarantine.record_work(OnDevice(encoding=("large",)))
        quarantine.record_engine_end(is_crash=False)
    assert not is_suspect(quarantine, SAME)


def test_work_of_previous_engine_is_not_blamed_again(quarantine: Quarantine) -> None:
    crash(quarantine, LARGE)
    admit(quarantine, LARGE)
    quarantine.record_engine_end(is_crash=True)
    assert not is_suspect(quarantine, SAME)


def test_zero_quarantine_seconds_disable_quarantine(clock: Clock) -> None:
    quarantine = Quarantine(0.0, clock)
    condemn(quarantine, LARGE)
    assert not is_refused(quarantine, LARGE)
    assert quarantine.num_shapes == 0


def test_quarantine_memory_is_bounded(quarantine: Quarantine) -> None:
    sizes = [(1 << width, 1 << height) for width in range(24) for height in range(24)]
    for submit in [ask("a", "", size) for size in sizes]:
        condemn(quarantine, submit)
        admit(quarantine, submit)
        quarantine.record_work(OnDevice(encoding=("a",)))
        quarantine.remove("a")
    assert quarantine.num_tracked == 0
    assert quarantine.num_shapes == len(quarantine._records) == 512
    assert not quarantine._done
    assert len(quarantine._working) == 1


@pytest.mark.parametrize("is_aborted", [True, False])
def test_crashes_are_forgotten_by_result_without_tokens(
    quarantine: Quarantine, *, is_aborted: bool
) -> None:
    """Such as vectors, or a decision; an aborted request says nothing."""
    streams = EngineStreams(quarantine)
    for _ in range(2):
        crash(quarantine, LARGE)
    streams.open("large", shape_of(LARGE))
    streams.deliver(OnDevice(encoding=("large",)))
    streams.deliver(Finished("large", Usage(7, 0), is_aborted=is_aborted))
    assert is_suspect(quarantine, LARGE) == is_aborted


def test_size_with_most_crashes_is_kept_when_there_are_too_many(quarantine: Quarantine) -> None:
    condemn(quarantine, LARGE)
    for width in range(24):
        for height in range(24):
            crash(quarantine, ask("other", "", (1 << width, 1 << height)))
    assert is_refused(quarantine, SAME)
