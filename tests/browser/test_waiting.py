"""What the page says while one waits for an answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.browser.conftest import Open
from tests.browser.test_views import accessibility_problems
from tests.support.daemons import Daemon, wait_until


def waiting_requests(daemon: Daemon) -> list[dict[str, Any]]:
    return list(daemon.status()["requests"]["list"])


def test_page_tells_place_in_queue_and_seconds(scripted_daemon: Daemon, open_page: Open) -> None:
    page = open_page(scripted_daemon)
    body = {"model": "default", "messages": [{"role": "user", "content": "wait"}]}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            url = f"{scripted_daemon.url}/v1/chat/completions"
            pool.submit(httpx.post, url, json=body, timeout=60)
        requests = partial(waiting_requests, scripted_daemon)
        wait_until(lambda: len(requests()) == 2, 10, scripted_daemon.log)
        page.get_by_role("textbox", name="Question", exact=True).fill("wait")
        page.keyboard.press("Enter")
        page.get_by_text("Waiting: 2 requests before yours").wait_for()
        page.locator(".clock", has_text="2 s").wait_for()
        assert accessibility_problems(page) == []
        page.keyboard.press("Escape")
        page.get_by_text("Stopped.").wait_for()
        for request in requests():
            httpx.post(f"{scripted_daemon.url}/v1/requests/{request['id']}/cancel")
    scripted_daemon.wait_idle()


@pytest.mark.parametrize(
    ("told", "line", "measure"),
    [
        ({"state": "preparing"}, "Preparing what to look at", ""),
        (
            {"state": "waiting_for_memory", "ahead": 1},
            "Waiting for memory: 1 request before yours",
            "",
        ),
        (
            {"state": "encoding", "done": 100, "total": 400},
            "Looking",
            "25 % of the pictures",
        ),
        (
            {"state": "prefill", "done": 512, "total": 2048},
            "Reading",
            "25 % of the prompt",
        ),
        (
            {
                "state": "waiting_for_model",
                "stage": "loading weights",
                "fraction": 0.4,
            },
            "Waiting for demo",
            "Loading weights40 %",
        ),
    ],
)
def test_page_says_state_of_request(
    scripted_daemon: Daemon, open_page: Open, told: dict[str, Any], line: str, measure: str
) -> None:
    wait = {"ahead": 0, "done": 0, "total": 0, "seconds": 1} | told
    shown = open_page(scripted_daemon).evaluate(
        """async (told) => {
          const {Waiting} = await import("/page/waiting.js");
          const waiting = new Waiting(true, "demo");
          waiting.tell(told);
          const shown = [waiting.line.parentElement.textContent, waiting.more.textContent];
          const meter = waiting.more.querySelector(".meter i");
          waiting.end();
          return [...shown, meter ? meter.style.width : ""];
        }""",
        wait,
    )
    assert shown[0] == line
    assert shown[1].startswith(measure)
    if told.get("total"):
        assert shown[2] == "25%"


def test_page_shows_one_number_of_seconds(scripted_daemon: Daemon, open_page: Open) -> None:
    shown = open_page(scripted_daemon).evaluate(
        """async () => {
          const {Waiting} = await import("/page/waiting.js");
          const waiting = new Waiting(false, "demo");
          waiting.began -= 4000;
          const texts = [{trouble: "line", seconds: 4}, {state: "waiting"}].map((told) => {
            waiting.tell(told);
            return waiting.element.querySelector("p").innerText;
          });
          waiting.end();
          return texts;
        }"""
    )
    assert shown == [
        "The server can\N{RIGHT SINGLE QUOTATION MARK}t be reached. "
        "Trying again in 4\N{NO-BREAK SPACE}s",
        "Waiting for its turn4 s",
    ]
