"""A watch on the page, of Chromium's fake camera."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.conftest import VIEWPORTS, Open
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon

STREAMS_DRAWN_ONLY = """() => {
  const { getContext, captureStream } = HTMLCanvasElement.prototype;
  const drawn = new WeakSet();
  HTMLCanvasElement.prototype.getContext = function (...kind) {
    drawn.add(this);
    return getContext.apply(this, kind);
  };
  HTMLCanvasElement.prototype.captureStream = function () {
    if (!drawn.has(this)) throw new DOMException("", "NS_ERROR_NOT_INITIALIZED");
    return captureStream.call(this);
  };
}"""
"""Lets canvases stream as in Firefox: once they have a context."""


def start(page: Any, question: str, answers: str = "") -> None:
    page.get_by_label("What should be watched for?").fill(question)
    page.get_by_label("Possible answers").fill(answers)
    page.get_by_role("button", name="Watch a camera").click()


def watches(daemon: Daemon) -> int:
    import httpx

    line = re.search(r"^vlm_server_watches (\d+)", httpx.get(f"{daemon.url}/metrics").text, re.M)
    assert line is not None
    return int(line[1])


@pytest.mark.parametrize(
    ("device", "scheme"), [(device, scheme) for device in VIEWPORTS for scheme in ("light", "dark")]
)
def test_watch_lists_answers_about_camera_and_stops(
    daemon: Daemon, open_page: Open, device: str, scheme: str
) -> None:
    page = open_page(daemon, "#watch", device=device, scheme=scheme)
    assert accessibility_problems(page) == []
    start(page, "What colour is the circle?", "red, green, blue")
    page.locator("#watch-state", has_text="Watching with demo").wait_for()
    first = page.locator("#watch-events li").last
    first.wait_for()
    assert first.locator("b").inner_text() in ("red", "green", "blue")
    assert re.search(r"[\d.]+ % sure", first.inner_text())
    assert watches(daemon) == 1
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    page.get_by_role("button", name="Stop").click()
    page.locator("#watch-state", has_text="Stopped.").wait_for()
    page.get_by_role("button", name="Watch a camera").wait_for()
    assert not page.locator("#watch-picture").is_visible()
    page.wait_for_timeout(300)
    assert watches(daemon) == 0


@pytest.mark.parametrize("device", list(VIEWPORTS))
def test_example_is_watched_without_camera(daemon: Daemon, open_page: Open, device: str) -> None:
    page = open_page(daemon, "#watch", device=device)
    page.evaluate("() => { delete MediaDevices.prototype.getUserMedia; }")
    page.evaluate(STREAMS_DRAWN_ONLY)
    page.get_by_role("button", name="Watch an example").click()
    page.locator("#watch-events li").nth(1).wait_for(timeout=40_000)
    answers = [item.locator("b").inner_text() for item in page.locator("#watch-events li").all()]
    assert answers[::-1][:2] == ["red", "blue"]
    assert page.evaluate("() => document.querySelector('#watch-picture').videoWidth") == 640
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    page.get_by_role("button", name="Stop").click()
    page.locator("#watch-state", has_text="Stopped.").wait_for()
    assert page.get_by_label("What should be watched for?").input_value()


def test_watch_without_permission_or_question_says_so(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, "#watch")
    page.get_by_role("button", name="Watch a camera").click()
    assert page.locator("#watch-stop").is_hidden(), "the question is missing"
    page.evaluate(
        "() => { navigator.mediaDevices.getUserMedia = () =>"
        " Promise.reject(new DOMException('no', 'NotAllowedError')); }"
    )
    start(page, "Is the door open?")
    page.get_by_text("The camera may not be seen: allow it in the browser.").wait_for()


def test_example_that_cannot_be_streamed_shows_why(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, "#watch")
    page.evaluate(
        "() => { HTMLCanvasElement.prototype.captureStream = () =>"
        " { throw new Error('There are no streams.'); }; }"
    )
    page.get_by_role("button", name="Watch an example").click()
    page.locator("#watch-problem", has_text="There are no streams.").wait_for()
    assert page.get_by_role("button", name="Watch an example").is_enabled()


def test_refused_watch_shows_why(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, "#watch")
    start(page, "Which one?", "same, same")
    page.locator("#watch-problem", has_text="has a label twice").wait_for()
    page.get_by_role("button", name="Watch a camera").wait_for()
