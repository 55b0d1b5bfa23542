"""What is blamed for a death, what is refused for it, and for how long."""

from __future__ import annotations

import pytest

from vlm_server.errors import RequestTooCostly
from vlm_server.protocol import (
    Image,
    ImagePart,
    Message,
    SamplingParams,
    Submit,
    TextPart,
    Video,
    VideoPart,
)
from vlm_server.supervisor.quarantine import Quarantine, Shape, shape_of

SECONDS = 600.0
LONG = "x" * 50_000
SCREENSHOT = (1920, 1080)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quarantine(clock: Clock) -> Quarantine:
    return Quarantine(SECONDS, clock)


def admit(quarantine: Quarantine, submit: Submit) -> None:
    quarantine.admit(submit.request_id, shape_of(submit))


def ask(
    request_id: str = "r",
    text: str = "What?",
    *sizes: tuple[int, int],
    n: int = 1,
    max_side: int | None = None,
    video_bytes: tuple[int, ...] = (),
) -> Submit:
    """A message with pictures of `sizes` and videos of so many bytes."""
    images = tuple(Image(b"", "hash", "PNG", w, h, "param", max_side) for w, h in sizes)
    videos = tuple(Video(bytes(size), "hash", "MP4", "param") for size in video_bytes)
    parts = (
        *map(ImagePart, range(len(images))),
        *map(VideoPart, range(len(videos))),
        TextPart(text),
    )
    return Submit(request_id, (Message("user", parts),), images, SamplingParams(n=n), videos)


def die(quarantine: Quarantine, *working: Submit) -> None:
    """An engine that has `working` on its device, and nothing else in flight, dies."""
    for submit in working:
        admit(quarantine, submit)
    quarantine.working(submit.request_id for submit in working)
    quarantine.engine_ended(is_death=True)


def is_refused(quarantine: Quarantine, submit: Submit) -> bool:
    """Whether it is; if not, it ends at once."""
    try:
        admit(quarantine, submit)
    except RequestTooCostly:
        return True
    quarantine.acquit(submit.request_id)
    return False


# ---- shapes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ask("a", "What?", SCREENSHOT), ask("b", "What is this, then?", (1921, 1080))),
        (ask("a", "", (2048, 2048)), ask("b", "", (2049, 2047))),
        (ask("a", "", (4096, 4096)), ask("b", "", (4095, 4095))),
        (ask("a", LONG), ask("b", LONG + "more")),
        (ask("a", "", *[SCREENSHOT] * 20), ask("b", "", *[SCREENSHOT] * 21)),
        (ask("a", video_bytes=(70_000,)), ask("b", video_bytes=(30_000, 39_000))),
        (ask("a", "", (4000, 4000), max_side=512), ask("b", "", (512, 512))),
    ],
)
def test_what_costs_about_the_same_has_the_same_shape(one: Submit, other: Submit) -> None:
    assert shape_of(one) == shape_of(other) is not None


@pytest.mark.parametrize(
    "other",
    [
        ask("b", "What?", (960, 540)),
        ask("b", "What?", SCREENSHOT, max_side=512),
        ask("b", "What?", *[SCREENSHOT] * 3),
        ask("b", "What?", SCREENSHOT, n=8),
        ask("b", LONG, SCREENSHOT),
        ask("b", "What?", SCREENSHOT, video_bytes=(100_000,)),
        ask("b", "What?", *[(240, 270)] * 32),
    ],
)
def test_what_costs_something_else_has_another_shape(other: Submit) -> None:
    assert shape_of(other) != shape_of(ask("a", "What?", SCREENSHOT))


def test_small_text_has_no_shape_and_a_small_picture_has_one() -> None:
    assert shape_of(ask("a", "x" * 16_384)) is None
    assert shape_of(ask("a", "x" * 2_000, n=8)) is None
    assert shape_of(ask("a", "x" * 3_000, n=8)) is not None
    assert shape_of(ask("a", LONG)) == Shape(0, 0, 0, 65536, 1)
    assert shape_of(ask("a", "", (1, 1))) == Shape(1, 1, 0, 0, 1)


def test_small_text_is_never_refused_whatever_died(quarantine: Quarantine) -> None:
    for _ in range(5):
        die(quarantine, ask("a", "Hello"))
    assert not is_refused(quarantine, ask("b", "Hello"))
    assert quarantine.num_shapes == 0


# ---- notes ---------------------------------------------------------------------------


def test_the_third_of_a_shape_is_refused_and_told_what_to_do(
    quarantine: Quarantine, clock: Clock
) -> None:
    die(quarantine, ask("a", "", SCREENSHOT))
    assert not is_refused(quarantine, ask("b", "", SCREENSHOT))
    clock.now += 100
    die(quarantine, ask("b", "", SCREENSHOT))
    assert quarantine.num_shapes == 1
    with pytest.raises(RequestTooCostly) as caught:
        admit(quarantine, ask("c", "", (1900, 1100)))
    assert caught.value.retry_after_seconds == SECONDS - 100
    assert "2 times" in caught.value.message
    assert "2,097,152 pixels" in caught.value.message
    assert "smaller or fewer images" in caught.value.message
    assert "500 seconds" in caught.value.message
    assert "video" not in caught.value.message
    assert quarantine.num_refused == 1
    assert not is_refused(quarantine, ask("d", "", (640, 480)))
    assert quarantine.num_refused == 1


@pytest.mark.parametrize(
    ("submit", "words"),
    [
        (ask("a", LONG), ["65,536 characters", "less text"]),
        (ask("a", video_bytes=(65_536,)), ["65,536 bytes", "a shorter video"]),
        (ask("a", LONG, n=8), ["8 choices", "a smaller `n`"]),
    ],
)
def test_the_message_names_what_is_there(
    quarantine: Quarantine, submit: Submit, words: list[str]
) -> None:
    die(quarantine, submit)
    die(quarantine, submit)
    with pytest.raises(RequestTooCostly) as caught:
        admit(quarantine, submit)
    assert [word for word in words if word not in caught.value.message] == []
    assert "picture" not in caught.value.message


def test_notes_expire_and_one_death_more_is_enough_again(
    quarantine: Quarantine, clock: Clock
) -> None:
    large = ask("a", "", SCREENSHOT)
    die(quarantine, large)
    clock.now += 400
    die(quarantine, large)
    clock.now += 199
    assert is_refused(quarantine, large)
    clock.now += 1
    assert not is_refused(quarantine, large)
    assert quarantine.num_shapes == 0
    die(quarantine, large)
    assert is_refused(quarantine, large)
    clock.now += SECONDS
    assert not is_refused(quarantine, large)


def test_deaths_that_are_far_apart_do_not_count_together(
    quarantine: Quarantine, clock: Clock
) -> None:
    for _ in range(4):
        die(quarantine, ask("a", "", SCREENSHOT))
        clock.now += SECONDS
        assert not is_refused(quarantine, ask("b", "", SCREENSHOT))


def test_two_of_a_shape_on_the_device_are_one_note(quarantine: Quarantine) -> None:
    die(quarantine, ask("a", "", SCREENSHOT), ask("b", "", SCREENSHOT))
    assert not is_refused(quarantine, ask("c", "", SCREENSHOT))


def test_nobody_is_blamed_but_who_is_on_the_device(quarantine: Quarantine) -> None:
    waiting, answered, past, failed, culprit = (
        ask(name, "", size)
        for name, size in zip(
            ["waiting", "answered", "past", "failed", "culprit"],
            [(64, 64), (128, 128), (256, 256), (512, 512), (4096, 4096)],
            strict=True,
        )
    )
    for _ in range(2):
        for submit in (waiting, answered, past, failed, culprit):
            admit(quarantine, submit)
        quarantine.working(["past"])
        quarantine.working(["answered", "failed", "culprit"])
        quarantine.acquit("answered")
        quarantine.finish("answered")
        quarantine.acquit("failed")
        quarantine.engine_ended(is_death=True)
    assert [is_refused(quarantine, s) for s in (waiting, answered, past, failed)] == [False] * 4
    assert is_refused(quarantine, culprit)
    assert quarantine.num_shapes == 1


def test_a_picture_that_nobody_waits_for_any_more_is_blamed(quarantine: Quarantine) -> None:
    """The encoder goes on with it after an abort, whatever is prefilled beside it."""
    for _ in range(2):
        admit(quarantine, ask("a", "", SCREENSHOT))
        quarantine.working(["a"])
        quarantine.finish("a")
        assert quarantine.num_tracked == 0
        quarantine.working(["a", "text"])
        quarantine.engine_ended(is_death=True)
    assert is_refused(quarantine, ask("b", "", SCREENSHOT))


def test_a_picture_that_was_aborted_is_not_blamed_for_the_next_work(quarantine: Quarantine) -> None:
    for _ in range(2):
        admit(quarantine, ask("a", "", SCREENSHOT))
        quarantine.working(["a"])
        quarantine.finish("a")
        die(quarantine, ask("b", LONG))
    assert not is_refused(quarantine, ask("c", "", SCREENSHOT))


def test_an_engine_that_was_to_end_is_no_death(quarantine: Quarantine) -> None:
    for _ in range(3):
        admit(quarantine, ask("a", "", SCREENSHOT))
        quarantine.working(["a"])
        quarantine.engine_ended(is_death=False)
    assert not is_refused(quarantine, ask("b", "", SCREENSHOT))


def test_what_the_last_engine_had_is_not_blamed_for_the_next_death(quarantine: Quarantine) -> None:
    die(quarantine, ask("a", "", SCREENSHOT))
    admit(quarantine, ask("a", "", SCREENSHOT))
    quarantine.engine_ended(is_death=True)
    assert not is_refused(quarantine, ask("b", "", SCREENSHOT))


def test_no_time_refuses_nothing(clock: Clock) -> None:
    quarantine = Quarantine(0.0, clock)
    for _ in range(3):
        die(quarantine, ask("a", "", SCREENSHOT))
    assert not is_refused(quarantine, ask("b", "", SCREENSHOT))
    assert quarantine.num_shapes == 0


def test_nothing_grows(quarantine: Quarantine) -> None:
    pixels = [1 << n for n in range(20)]
    submits = [ask("a", "x" * text, (n, 1)) for text in (1, 20_000, 40_000, 80_000) for n in pixels]
    for submit in submits:
        die(quarantine, submit)
        die(quarantine, submit)
    assert quarantine.num_tracked == 0
    assert len(quarantine._notes) == 64
    assert quarantine.num_shapes == 32
    assert [is_refused(quarantine, submit) for submit in submits] == [False] * 48 + [True] * 32
