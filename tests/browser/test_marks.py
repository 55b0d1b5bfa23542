"""Marks on the picture, and the picture as large as the window."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import VIEWPORTS, Open
from tests.browser.files import ask, attach
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon
from tests.support.images import canvas, draw_shape, encoded

BOXES = (
    '[{"bbox_2d": [125, 250, 375, 750], "label": "circle"},'
    ' {"point_2d": [750, 500], "label": "star"}]'
)


def picture() -> bytes:
    image = draw_shape(canvas((640, 400)), "circle", "red", (160, 200), 80)
    return encoded(draw_shape(image, "star", "green", (480, 200), 80))


def answered(daemon: Daemon, open_page: Open, device: str = "desktop") -> Any:
    page = open_page(daemon, device=device)
    attach(page, "drop", (picture(), "two.png", "image/png"))
    ask(page, f"say 0 {BOXES}")
    return page


@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_numbered_marks_have_legend_with_pixels(
    scripted_daemon: Daemon, open_page: Open, device: str
) -> None:
    page = answered(scripted_daemon, open_page, device)
    assert page.locator(".marked .mark").all_inner_texts() == ["1", "2"]
    rows = page.locator(".marked .places li")
    assert rows.nth(0).inner_text().split() == ["1", "circle", "80,", "100,", "240,", "300", "Copy"]
    assert rows.nth(1).inner_text().split() == ["2", "star", "480,", "200", "Copy"]
    rows.nth(1).get_by_role("button", name="Copy").click()
    rows.nth(1).get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "480, 200"
    assert page.locator(".mark.lit").inner_text() == "2"
    assert accessibility_problems(page) == []
    check_that_it_fits(page)


def test_picture_zooms_and_tells_pixels(scripted_daemon: Daemon, open_page: Open) -> None:
    page = answered(scripted_daemon, open_page)
    page.get_by_role("button", name="Enlarge the picture").click()
    stage = page.locator(".viewer-stage")
    layer = page.locator(".viewer .layer")
    box = layer.bounding_box()
    across, down = box["x"] + box["width"] / 4 + 1, box["y"] + box["height"] / 2 + 1
    page.mouse.move(across, down)
    x, y = page.locator(".position").inner_text().replace("x ", "").replace("y ", "").split(", ")
    assert abs(int(x) - 160) <= 1
    assert abs(int(y) - 200) <= 1
    page.mouse.wheel(0, -300)
    assert layer.bounding_box()["width"] > 2 * box["width"]
    page.mouse.move(across + 0.1, down)
    assert page.locator(".position").inner_text() == f"x {x}, y {y}", "it stays where it is"
    page.keyboard.press("c")
    page.locator(".viewer").get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == f"{x}, {y}"
    page.keyboard.press("0")
    assert layer.bounding_box() == box
    before = layer.bounding_box()["x"]
    page.keyboard.press("ArrowLeft")
    assert layer.bounding_box()["x"] == before + 60
    assert page.locator(".viewer .mark").count() == 2
    assert accessibility_problems(page) == []
    page.keyboard.press("Escape")
    stage.wait_for(state="detached")
    assert page.evaluate("document.activeElement.ariaLabel") == "Enlarge the picture"


def test_picture_of_question_is_enlarged_by_keyboard(
    scripted_daemon: Daemon, open_page: Open
) -> None:
    page = answered(scripted_daemon, open_page)
    page.get_by_role("button", name="Enlarge two.png").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Picture two.png").wait_for()
    page.get_by_role("button", name="Larger").click()
    page.get_by_role("button", name="Close").click()
    page.get_by_role("dialog").wait_for(state="detached")


@pytest.mark.parametrize("width", [390, 320])
def test_head_of_enlarged_picture_has_room_on_phones(
    scripted_daemon: Daemon, open_page: Open, width: int
) -> None:
    page = open_page(scripted_daemon, device="phone")
    name = "a photograph with a name that is longer than any phone is wide.png"
    attach(page, "drop", (picture(), name, "image/png"))
    ask(page, f"say 0 {BOXES}")
    page.set_viewport_size({"width": width, "height": 844})
    page.get_by_role("button", name="Enlarge the picture").click()
    stage = page.locator(".viewer-stage")
    stage.tap()
    page.locator(".position", has_text="x ").wait_for()
    check_that_it_fits(page)
    boxes = [one.bounding_box() for one in page.locator(OF_HEAD).all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            assert not overlap(one, other), (one, other)
    assert stage.bounding_box()["y"] < 64, "one line above the picture"


OF_HEAD = ".viewer :is(header b, header .name span, header button, header output):visible"


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "width"), ("y", "height"))
    )
