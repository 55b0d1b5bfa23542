"""Every state of a conversation, in light and dark, on desktops and phones: accessible, and fits.

`PHOTOGRAPHS` names a folder for the photographs: see `test_views`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import VIEWPORTS, Open
from tests.browser.files import ask, attach
from tests.browser.test_ask import SQUARE
from tests.browser.test_inputs import CLIP, report
from tests.browser.test_markdown import TEXT
from tests.browser.test_marks import BOXES, picture
from tests.browser.test_markup import CALL
from tests.browser.test_views import check_shapes
from tests.support.daemons import Daemon

TWO = (picture(), "two.png", "image/png")


def begin(page: Any, question: str) -> None:
    page.get_by_role("textbox", name="Question", exact=True).fill(question)
    page.keyboard.press("Enter")


def stop(page: Any) -> None:
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()


def empty(page: Any) -> None:
    page.locator("#sample img").evaluate("async (image) => { await image.decode(); }")


def one(page: Any) -> None:
    attach(page, "drop", TWO)


def attached(page: Any) -> None:
    attach(page, "drop", SQUARE, CLIP, report("CUP"))
    page.locator("#attachments .frames canvas").nth(5).wait_for()
    page.locator("#attachments .sheets img").wait_for()


def document(page: Any) -> None:
    attach(page, "drop", report(*(f"PAGE {number}" for number in range(1, 9))))
    page.locator("#stage .sheets img").nth(5).wait_for()


def waiting(page: Any) -> None:
    begin(page, "wait")
    page.locator(".waiting", has_text="Waiting").wait_for()


def written(page: Any) -> None:
    ask(page, f"say 0 {TEXT}")
    page.locator(".text math").nth(2).wait_for()


def stopped(page: Any) -> None:
    begin(page, "say 0.2 one two three four five six seven eight")
    page.locator(".answer .text p").wait_for()
    stop(page)


def failed(page: Any) -> None:
    error = {"message": "The picture has 400,000,000 pixels; 100,000,000 are allowed.", "code": "x"}
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": error})
    )
    ask(page, "What is in it?")


def edited(page: Any) -> None:
    ask(page, "say 0 one")
    ask(page, "say 0 two")
    page.get_by_role("button", name="Edit").first.click()


def versions(page: Any) -> None:
    ask(page, "say 0 one").get_by_role("button", name="Again").click()
    page.get_by_text("2 of 2").wait_for()
    page.locator(".answer .figures", has_text="From cache").wait_for()


def marked(page: Any) -> None:
    attach(page, "drop", TWO)
    ask(page, f"say 0 {BOXES}")


def unread(page: Any) -> None:
    answer = ask(page, f"say 0 I click on it. {CALL}\n\n<think>Was it the blue one?</think>")
    answer.locator(".unread summary").first.click()


def enlarged(page: Any) -> None:
    marked(page)
    page.get_by_role("button", name="Enlarge the picture").click()
    page.get_by_role("dialog").wait_for()


def wrong_options(page: Any) -> None:
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_label("Answer as JSON").fill('{"type": "objekt"}')


def compared(page: Any) -> None:
    attach(page, "drop", TWO)
    page.get_by_role("button", name="Compare two answers").click()
    ask(page, "say 0 A **blue** square.")


def history(page: Any) -> None:
    for word in ("apples", "pears"):
        if page.get_by_role("button", name="New", exact=True).is_visible():
            page.get_by_role("button", name="New", exact=True).click()
        ask(page, f"say 0 {word}")
    if page.locator("#history").is_hidden():
        page.get_by_role("button", name="Conversations", exact=True).click()
    page.get_by_label("More about say 0 pears").click()


def camera(page: Any) -> None:
    page.evaluate("import('/page/capture.js').then(({camera}) => void camera())")
    page.get_by_role("button", name="Take picture").wait_for()


STATES: dict[str, Callable[[Any], None]] = {
    state.__name__: state
    for state in (
        *(
            empty,
            one,
            attached,
            document,
            waiting,
            written,
            stopped,
            failed,
            edited,
            versions,
            marked,
            unread,
            enlarged,
        ),
        *(wrong_options, compared, history, camera),
    )
}


@pytest.mark.whole
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_every_state_is_accessible_and_fits(
    scripted_daemon: Daemon,
    open_page: Open,
    tmp_path: Path,
    state: str,
    scheme: str,
    device: str,
) -> None:
    page = open_page(scripted_daemon, device=device, scheme=scheme)
    STATES[state](page)
    check_shapes(page, tmp_path / f"{state}-{scheme}-{device}.png", device)
    if state == "waiting":
        stop(page)
