"""Again, edit, continue, stop; and answers that outlive broken lines and engines."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.files import ask, attach, wait_until_answered
from tests.browser.test_ask import SQUARE, text_of
from tests.browser.test_views import accessibility_problems, check_shapes, check_that_it_fits
from tests.support.daemons import SCRIPTED, Daemon, running_daemon

LETTERS = "a b c d e f g h i j k l m n o p"


@pytest.fixture
def page(scripted_daemon: Daemon, open_page: Open) -> Any:
    return open_page(scripted_daemon)


def begin(page: Any, question: str) -> Any:
    """Send a question; return its answer's text once it has begun."""
    number = page.locator(".answer").count()
    page.get_by_role("textbox", name="Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    text = page.locator(".answer").nth(number).locator(".text")
    text.locator("p").wait_for()
    return text


def texts(page: Any) -> list[str]:
    return list(page.locator(".answer .text").all_inner_texts())


def test_second_answer_is_asked_for_and_both_stay(page: Any) -> None:
    answer = ask(page, "say 0 one")
    answer.get_by_role("button", name="Again").click()
    page.get_by_text("2 of 2").wait_for()
    wait_until_answered(page)
    page.get_by_role("button", name="Answer before").click()
    page.get_by_text("1 of 2").wait_for()
    assert texts(page) == ["one"]


def test_edited_question_replaces_later_turns(page: Any) -> None:
    ask(page, "say 0 one")
    ask(page, "say 0 two")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_text("The turn after it will be removed.").wait_for()
    page.get_by_label("Edit the question").fill("say 0 three")
    with page.expect_request("**/v1/chat/completions") as request:
        page.keyboard.press("Enter")
    assert len(request.value.post_data_json["messages"]) == 1
    page.locator(".answer .figures").wait_for()
    assert texts(page) == ["three"]


def test_escape_leaves_edited_question_as_it_was(page: Any) -> None:
    ask(page, "say 0 one")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the question").fill("something else")
    page.keyboard.press("Escape")
    assert page.locator(".asked .said").inner_text() == "say 0 one"


def test_stopped_answer_is_continued(page: Any) -> None:
    text = begin(page, f"say 0.1 {LETTERS}")
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    begun = text.inner_text()
    assert begun != LETTERS
    with page.expect_request("**/v1/chat/completions") as request:
        page.get_by_role("button", name="Continue").click()
    assert request.value.post_data_json["continue_final_message"] is True
    page.locator(".answer .figures", has_text="From cache").wait_for()
    assert text.inner_text() == LETTERS
    assert page.get_by_role("button", name="Continue").count() == 0


def test_stopped_answer_ends_in_engine(scripted_daemon: Daemon, page: Any) -> None:
    """Closing the line does not end an answer that can be resumed."""
    begin(page, f"say 1 {LETTERS}")
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    scripted_daemon.wait_idle(5)


def test_answer_that_was_cut_off_is_continued(page: Any) -> None:
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Longest answer").fill("3")
    answer = ask(page, f"say 0.01 {LETTERS}")
    answer.get_by_text("Cut off at the longest answer allowed").wait_for()
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Longest answer").fill("")
    answer.get_by_role("button", name="Continue").click()
    answer.locator(".text", has_text=re.compile("^a b c d e f")).wait_for()
    wait_until_answered(page)


def test_answer_goes_on_after_engine_dies(scripted_daemon: Daemon, page: Any) -> None:
    text = begin(page, f"say 0.15 {LETTERS}")
    os.kill(scripted_daemon.engine_pid(), signal.SIGKILL)
    page.locator(".answer .waiting", has_text="started again").wait_for()
    assert text.inner_text(), "what was written stays"
    page.locator(".answer .figures").wait_for()
    assert text.inner_text() == LETTERS
    assert page.get_by_role("alert").count() == 0


def test_answer_goes_on_after_page_is_loaded_again(page: Any) -> None:
    text = begin(page, f"say 0.15 {LETTERS}")
    page.wait_for_timeout(500)  # until its id is kept
    with page.expect_request(
        lambda request: "last-event-id" in request.headers, timeout=10_000
    ) as resumed:
        page.reload()
    assert resumed.value.post_data_json == {}
    page.locator(".answer .figures").wait_for()
    assert text.inner_text() == LETTERS


def test_answer_goes_on_after_line_breaks(page: Any) -> None:
    """The line breaks in mid-answer, and for a second nothing can be reached."""
    page.evaluate(
        """() => {
          const real = window.fetch;
          window.cut = null;
          window.fetch = async (path, options) => {
            if (window.cut === "down") throw new TypeError("network");
            const response = await real(path, options);
            if (!String(path).includes("chat/completions")) return response;
            const reader = response.body.getReader();
            const body = new ReadableStream({
              async pull(controller) {
                const {value, done} = await reader.read();
                if (window.cut === "now") {
                  window.cut = "down";
                  setTimeout(() => (window.cut = null), 1000);
                  reader.cancel();
                  controller.error(new TypeError("network"));
                } else if (done) controller.close();
                else controller.enqueue(value);
              },
            });
            return new Response(body, {status: response.status, headers: response.headers});
          };
        }"""
    )
    text = begin(page, f"say 0.15 {LETTERS}")
    page.evaluate("window.cut = 'now'")
    page.get_by_text(re.compile("The server can.t be reached")).first.wait_for()
    assert text.inner_text()
    page.locator(".answer .figures").wait_for()
    assert text.inner_text() == LETTERS


def test_question_waits_for_full_server(page: Any) -> None:
    """A busy server is asked again, after the time that it says."""
    refused = []

    def refuse(route: Any) -> None:
        if len(refused) == 2:
            route.continue_()
            return
        refused.append(route.request)
        error = {"message": "Too many requests.", "code": "queue_full"}
        route.fulfill(status=429, json={"error": error}, headers={"Retry-After": "1"})

    page.route("**/v1/chat/completions", refuse)
    page.get_by_role("textbox", name="Question", exact=True).fill("say 0 at last")
    page.keyboard.press("Enter")
    page.get_by_text("as many requests as it takes. Trying again in 1 s").wait_for()
    page.locator(".answer .figures").wait_for()
    assert texts(page) == ["at last"]
    assert len(refused) == 2


def test_question_is_asked_again_as_soon_as_engine_is_ready(page: Any) -> None:
    """A restart may take less time than the server says."""

    def refuse(route: Any) -> None:
        error = {"message": "The engine restarts.", "code": "engine_unavailable"}
        route.fulfill(status=503, json={"error": error}, headers={"Retry-After": "30"})

    page.route("**/v1/chat/completions", refuse)
    page.route("**/health/ready", lambda route: route.fulfill(status=503, json={"status": "x"}))
    page.get_by_role("textbox", name="Question", exact=True).fill("say 0 at last")
    page.keyboard.press("Enter")
    page.get_by_text("The model is being started. Trying again in 29 s").wait_for()
    page.unroute("**/v1/chat/completions")
    page.unroute("**/health/ready")
    page.locator(".answer .figures").wait_for(timeout=10_000)
    assert texts(page) == ["at last"]


def test_error_has_servers_reason_and_can_be_tried_again(page: Any) -> None:
    def refuse(route: Any) -> None:
        error = {"message": "The picture has too many pixels.", "code": "invalid_image"}
        route.fulfill(status=400, json={"error": error})

    page.route("**/v1/chat/completions", refuse)
    answer = ask(page, "say 0 after all")
    alert = answer.get_by_role("alert")
    assert "The picture has too many pixels." in alert.inner_text()
    page.unroute("**/v1/chat/completions")
    alert.get_by_role("button", name="Try again").click()
    page.locator(".answer .figures", has_text="From cache").wait_for()
    assert texts(page) == ["after all"]


def test_refused_question_is_left_out_of_later_ones(page: Any) -> None:
    ask(page, "say 0 one")

    def refuse(route: Any) -> None:
        error = {"message": "The PDF can't be read.", "code": "invalid_document"}
        route.fulfill(status=400, json={"error": error})

    page.route("**/v1/chat/completions", refuse)
    answer = ask(page, "say 0 two")
    assert "this one is then left out" in answer.get_by_role("alert").inner_text()
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "say 0 three")
    sent = request.value.post_data_json["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert texts(page)[-1] == "three"


def test_keys_send_recall_and_find_question(page: Any) -> None:
    ask(page, "say 0 one")
    ask(page, "say 0 two")
    question = page.get_by_role("textbox", name="Question", exact=True)
    page.keyboard.press("ArrowUp")
    assert question.input_value() == "say 0 two"
    page.keyboard.press("ArrowUp")
    assert question.input_value() == "say 0 one"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert question.input_value() == ""
    page.get_by_role("button", name="Options").focus()
    page.keyboard.press("/")
    assert question.evaluate("box => document.activeElement === box")
    question.fill("say 0 three")
    page.get_by_role("button", name="Options").focus()
    page.keyboard.press("Control+Enter")
    page.locator(".answer").nth(2).wait_for()
    question.fill("line")
    page.keyboard.press("Shift+Enter")
    assert question.input_value() == "line\n"


def test_figures_are_explained_without_mouse(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, device="phone")
    attach(page, "drop", SQUARE)
    answer = ask(page, "What shape is this?")
    why = answer.get_by_text("From sending the question to the first token")
    assert not why.is_visible()
    button = answer.get_by_role("button", name="Details")
    button.tap()
    assert why.is_visible()
    assert button.get_attribute("aria-expanded") == "true"
    assert accessibility_problems(page) == []
    check_that_it_fits(page)


def test_actions_are_seen_and_large_enough_for_fingers(daemon: Daemon, open_page: Open) -> None:
    page = open_page(daemon, device="phone")
    ask(page, "Hi")
    page.get_by_role("button", name="Conversations").click()
    menu = page.locator("#history-list summary")
    menu.wait_for()
    page.wait_for_timeout(100)
    for action in (menu, *page.locator(".copies button").all()):
        box = action.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) >= 36
        assert action.evaluate("one => getComputedStyle(one).opacity") == "1"
    again = page.get_by_role("button", name="Again").get_by_text("Again").bounding_box()
    assert again is not None
    assert min(again["width"], again["height"]) > 10, "its name is seen where no mouse rests"


def test_actions_of_cut_off_answer_fit_on_phone(
    scripted_daemon: Daemon, open_page: Open, tmp_path: Path
) -> None:
    page = open_page(scripted_daemon, device="phone")
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Longest answer").fill("3")
    ask(page, f"say 0.01 {LETTERS}").get_by_role("button", name="Continue").wait_for()
    check_shapes(page, tmp_path / "cut-off.png", "phone")


def test_actions_are_icons_with_names_and_tooltips(page: Any) -> None:
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Longest answer").fill("3")
    answer = ask(page, f"say 0.01 {LETTERS}")
    answer.get_by_text("Cut off at the longest answer allowed").wait_for()
    assert page.locator(".asked .copies button:has(svg)").all_inner_texts() == ["Edit", "Copy"]
    names = ["Continue", "Again", "Copy", "Copy as curl", "Copy as Python", "Details"]
    actions = answer.locator(".copies button:has(svg)")
    assert actions.all_inner_texts() == names
    assert all(action.get_attribute("title") for action in actions.all())
    copy = answer.get_by_role("button", name="Copy", exact=True)
    copy.focus()
    page.keyboard.press("Enter")
    done = answer.get_by_role("button", name="Copied", exact=True)
    assert done.locator("use").get_attribute("href") == "#i-done"
    assert page.evaluate("navigator.clipboard.readText()") == text_of(answer)
    copy.wait_for()
    assert copy.locator("use").get_attribute("href") == "#i-copy"
    assert accessibility_problems(page) == []


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_end_of_each_answer_is_shown(daemon: Daemon, open_page: Open, device: str) -> None:
    """While the page scrolls smoothly to a question, its answer is written already."""
    page = open_page(daemon, device=device, motion="no-preference")
    page.locator("#sample button").first.click()
    page.locator(".answer .figures").wait_for()
    for _ in range(4):
        ask(page, "How many blue squares are there?")
        wait_for_end(page)
    page.get_by_role("button", name="Compare two answers").click()
    wait_for_end(page)


def wait_for_end(page: Any) -> None:
    """Wait until the last line of the page is shown."""
    for _ in range(50):
        if page.evaluate(TO_END) < 2:
            return
        page.wait_for_timeout(100)
    pytest.fail(f"{page.evaluate(TO_END)} pixels are below")


TO_END = "document.documentElement.scrollHeight - scrollY - innerHeight"


def test_names_in_error_are_shown_as_code(page: Any) -> None:
    error = {"message": "`temperature` must be at most 2.", "code": "invalid_value"}
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": error})
    )
    answer = ask(page, "say 0 one")
    assert answer.locator(".error code").inner_text() == "temperature"
    assert "`" not in answer.locator(".error").inner_text()


GONE_MS = 2000
"""Within which the page has to tell that the server is gone, once something failed."""
NO_CALM_LOOKS = """{
  const original = window.setTimeout;
  window.setTimeout = (act, ms, ...more) => (ms >= 5000 ? 0 : original(act, ms, ...more));
}"""


@pytest.mark.parametrize("what", ["question", "answer", "look"])
def test_page_says_promptly_that_server_is_gone(open_page: Open, tmp_path: Path, what: str) -> None:
    with running_daemon(tmp_path, program=SCRIPTED) as daemon:
        page = open_page(daemon)
        page.add_init_script(NO_CALM_LOOKS)
        page.reload()
        page.locator("#state[data-state=ready]").wait_for()
        if what == "answer":
            begin(page, f"say 0.2 {'word ' * 100}")
        if what == "look":
            page.locator("nav a[href='#now']").click()
            page.get_by_text("Nothing is running").wait_for()
        daemon.process.kill()
        daemon.process.wait()
        if what == "question":
            page.get_by_role("textbox", name="Question", exact=True).fill("say 0 one")
            page.keyboard.press("Enter")
        page.locator("#state", has_text="No connection").wait_for(timeout=GONE_MS)
        assert page.locator("#state").get_attribute("data-state") == "unreachable"
