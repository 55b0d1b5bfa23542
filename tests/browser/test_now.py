"""*Now* on the page: requests, memory, times and the log, on all screens."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.browser.conftest import VIEWPORTS, Open
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon
from tests.support.images import one_shape, user
from vlm_server.settings.quantities import GIB
from vlm_server.sizes import file_size, memory_size

SIDEWAYS = (844, 390)


def ask_some(daemon: Daemon) -> None:
    """A question about a picture, one in Anthropic's dialect, and a bad one."""
    client = daemon.client()
    message: Any = user("What shape is this?", one_shape("circle", "red"))
    client.chat.completions.create(model="demo", messages=[message], max_tokens=20)
    greeting = [{"role": "user", "content": "Hello"}]
    body = {"model": "demo", "max_tokens": 5, "messages": greeting}
    httpx.post(f"{daemon.url}/v1/messages", json=body, timeout=60).raise_for_status()
    bad = httpx.post(f"{daemon.url}/v1/chat/completions", json=body | {"max_tokens": "many"})
    assert bad.status_code == 400


def test_now_shows_last_requests_times_memory_and_log(daemon: Daemon, open_page: Open) -> None:
    ask_some(daemon)
    page = open_page(daemon, "#now")
    bad, anthropic, picture = (page.locator("li.ended").nth(number) for number in range(3))
    bad.get_by_text("invalid value").wait_for()
    assert "Anthropic" in anthropic.inner_text()
    assert "1 picture" in picture.inner_text()
    assert "Done" in picture.inner_text()
    label = picture.locator(".stack").get_attribute("aria-label")
    assert re.search(r"Prompt: [\d.]+ m?s, Answer: [\d.]+ .?s$", label)
    whole = picture.locator(".stack").bounding_box()["width"]
    parts = [part.bounding_box()["width"] for part in picture.locator(".stack i").all()]
    assert sum(parts) > 0.8 * whole, "the parts fill the bar of a request, however short it was"
    times = page.locator(".delays table")
    assert times.locator("tbody th").all_inner_texts()[1] == "First token"
    _, status = daemon.get("/v1/status")
    (model,) = status["models"]
    limit = memory_size(model["memory"]["limit_bytes"])
    memory = page.locator(".uses li")
    assert f"of {limit}" in memory.locator("p").first.inner_text()
    assert "Weights: " in memory.locator(".stack").get_attribute("aria-label")
    assert page.locator(".chart .scale").count() >= 2, "the chart has a scale"
    page.locator(".log p", has_text="invalid value").first.wait_for()
    page.get_by_label("Warnings only").check()
    assert page.locator(".log p:visible", has_text="invalid value").count() == 0


def test_now_shows_tokens_per_second_and_their_line(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, "#now")
    answers = page.locator(".speed dd").first
    answers.filter(has_text=re.compile(r"^0 tokens/s$")).wait_for()
    stream = daemon.client().chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream:
        answers.filter(has_text=re.compile(r"^[1-9]\d* tokens/s$")).wait_for()
        page.locator(".speed", has_text=re.compile("highest [1-9]")).wait_for()
    answers.filter(has_text=re.compile(r"^0 tokens/s$")).wait_for()
    assert page.locator(".speed", has_text=re.compile("highest [1-9]")).count() == 1


HIGHEST = """([time, samples]) => import("/page/panels.js").then(({speed}) => {
  const rates = {written: null, read: null};
  const {elements} = speed({time, engine: {memory_samples: samples}}, rates);
  return elements[0].textContent.match(/highest (\\d+)/)[1];
})"""


def test_line_of_speed_counts_anew_after_restart_of_engine(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)

    def highest(time: float, *counts: tuple[int, int]) -> int:
        samples = [{"at": at, "generated_tokens": tokens} for at, tokens in counts]
        return int(page.evaluate(HIGHEST, [time, samples]))

    assert highest(1025, (1000, 100), (1010, 300), (1020, 310)) == 20
    assert highest(1025, (1000, 9000), (1010, 50)) == 5, "an engine began at 0"
    assert highest(1025, (1000, 100), (1020, 140)) == 8, "five seconds of the last ten"
    assert highest(1900, (1000, 100), (1010, 300)) == 0, "too long ago"
    assert highest(1025) == 0


def test_page_shows_sizes_as_terminal_does(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon)
    sizes = [0, 1, 999, 1000, 1023, 1024, 10**6, 3_110_000_000, 100 * GIB, 4 << 40, 7 * 10**15]
    sizes += [round(1.7**power) for power in range(75)]
    shown = page.evaluate(
        """(sizes) => import("/page/dom.js").then(({memorySize, fileSize}) =>
          sizes.map((size) => [memorySize(size), fileSize(size)]))""",
        sizes,
    )
    assert shown == [[memory_size(size), file_size(size)] for size in sizes]


def test_log_grows_and_stays_at_its_end(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, "#now")
    page.locator(".log p").first.wait_for()
    for _ in range(12):
        httpx.get(f"{daemon.url}/v1/models")
    httpx.get(f"{daemon.url}/api/version")
    page.locator(".log p", has_text="GET /api/version").last.wait_for()
    rest = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
    assert page.locator(".log").evaluate(rest) < 2
    page.locator(".log").evaluate("(log) => log.scrollTop = 0")
    lines = page.locator(".log p").count()
    httpx.get(f"{daemon.url}/version")
    page.locator(".log p").nth(lines).wait_for(state="attached")
    assert page.locator(".log").evaluate("(log) => log.scrollTop") == 0, "it is being read"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", [*VIEWPORTS, "sideways"])
def test_now_with_requests_is_accessible_and_fits(
    daemon: Daemon, open_page: Open, device: str, scheme: str
) -> None:
    ask_some(daemon)
    is_sideways = device == "sideways"
    page = open_page(daemon, "#now", device="phone" if is_sideways else device, scheme=scheme)
    page.locator("li.ended").nth(2).wait_for()
    width, height = SIDEWAYS if is_sideways else VIEWPORTS[device]
    for size in ((width, height), (320, 640)):
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.locator(".log p").first.wait_for()
        assert accessibility_problems(page) == []
        check_that_it_fits(page)
