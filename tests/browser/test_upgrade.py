"""Parts of the page that can't be loaded when they are needed: the server is away, or another."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.browser.conftest import VIEWPORTS, Open
from tests.browser.files import ask, attach
from tests.browser.test_ask import SQUARE, text_of
from tests.browser.test_options import open_options
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon

MODULES = re.compile(r"/page/v-\w+/(?:models|schema_fields|vendor/markdown-it\.min)\.js")


def lose_modules(page: Any, how: str) -> None:
    """Load the page anew, which gets no modules later: the server is `away`, or `upgraded`."""

    def answer(route: Any) -> None:
        if how == "away":
            route.abort()
        else:
            route.continue_(url=re.sub(r"v-\w+", f"v-{16 * '0'}", route.request.url))

    page.route(MODULES, answer)
    page.reload()
    page.locator("#state[data-state=ready]").wait_for()


@pytest.mark.parametrize("device", list(VIEWPORTS))
@pytest.mark.parametrize("how", ["away", "upgraded"])
def test_view_that_cannot_be_loaded_says_so_and_comes_with_next_try(
    daemon: Daemon, open_page: Open, how: str, device: str
) -> None:
    page = open_page(daemon, device=device)
    lose_modules(page, how)
    link = page.locator("nav a[href='#models']")
    link.click()
    page.get_by_role("alert").filter(has_text="A part of this page").wait_for()
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    page.unroute(MODULES)
    link.click()
    page.locator("#models .card").first.wait_for()
    assert page.locator("#unloaded").is_hidden()


def test_browser_that_keeps_failed_imports_gets_view_with_next_try(
    daemon: Daemon, open_page: Open
) -> None:
    page = open_page(daemon)
    page.route(re.compile(r"/models\.js$"), lambda route: route.abort())
    page.reload()
    page.locator("#state[data-state=ready]").wait_for()
    link = page.locator("nav a[href='#models']")
    link.click()
    link.click()
    page.locator("#models .card").first.wait_for()
    assert page.locator("#unloaded").is_hidden()


def test_page_loaded_again_has_missing_view_and_conversation(
    daemon: Daemon, open_page: Open
) -> None:
    page = open_page(daemon)
    attach(page, "drop", SQUARE)
    assert text_of(ask(page, "What shape is this?")) == "square"
    lose_modules(page, "upgraded")
    page.get_by_role("textbox", name="Question", exact=True).fill("And its col")
    page.locator("nav a[href='#models']").click()
    again = page.get_by_role("button", name="Try again")
    again.wait_for()
    page.unroute(MODULES)
    again.click()
    page.locator("#models .card").first.wait_for()
    page.locator("nav a[href='#ask']").click()
    page.locator(".answer .text", has_text=re.compile("^square$", re.IGNORECASE)).wait_for()
    question = page.get_by_role("textbox", name="Question", exact=True)
    assert question.input_value() == "And its col"


@pytest.mark.parametrize("name", ["main", "thread"])
def test_page_without_its_first_modules_says_so_and_comes_by_itself(
    daemon: Daemon, open_page: Open, name: str
) -> None:
    page = open_page(daemon)
    lost = re.compile(rf"/page/v-\w+/{name}\.js")
    page.route(lost, lambda route: route.abort())
    page.reload()
    alert = page.get_by_role("alert").filter(has_text="the server was restarted")
    alert.wait_for()
    page.locator("#unloaded").get_by_text(re.compile(r"\bin \d s")).wait_for()
    assert not re.search(r"\d", alert.inner_text()), "it would be spoken anew each second"
    assert page.locator("#state").inner_text() == "Not loaded"
    assert accessibility_problems(page) == []
    check_that_it_fits(page)
    page.unroute(lost)
    page.locator("#state[data-state=ready]").wait_for()
    assert page.locator("#unloaded").is_hidden()


def test_page_that_never_gets_its_modules_stops_trying(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    lost = re.compile(r"/page/v-\w+/main\.js")
    page.route(lost, lambda route: route.abort())
    page.evaluate("sessionStorage.setItem('vlm_server tries', 5)")
    page.reload()
    page.get_by_role("alert").filter(has_text="files of it are missing").wait_for()
    page.unroute(lost)
    page.get_by_role("button", name="Try again").click()
    page.locator("#state[data-state=ready]").wait_for()


def test_fields_that_could_not_be_loaded_come_with_next_try(
    daemon: Daemon, open_page: Open
) -> None:
    page = open_page(daemon)
    lose_modules(page, "away")
    open_options(page)
    page.locator("#unloaded").wait_for()
    page.unroute(MODULES)
    for _ in "close", "open", "close", "open":
        open_options(page)
    assert page.locator("#unloaded").is_hidden()
    page.get_by_role("button", name="Add a field").click()
    assert len(json.loads(page.get_by_label("Answer as JSON").input_value())["properties"]) == 1


def test_answer_without_parser_is_plain_and_says_so(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    lose_modules(page, "upgraded")
    attach(page, "drop", SQUARE)
    assert text_of(ask(page, "What shape is this?")) == "square"
    assert page.locator("#unloaded").is_visible()
    page.unroute(MODULES)
    ask(page, "What colour is it?")
    page.locator("#unloaded").wait_for(state="hidden")
