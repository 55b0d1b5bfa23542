"""Marks of a model's own in an answer: tool calls that can't be read, stray reasoning, turns."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.files import ask
from tests.browser.test_views import accessibility_problems, check_that_it_fits
from tests.support.daemons import Daemon

CALL = '<tool_call>{"name": "click", "arguments": {"x": 1</tool_call>'
WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const text = document.querySelector(".answer .text").cloneNode(true);
    for (const one of text.querySelectorAll(".unread pre, code")) one.remove();
    window.seen.push(text.textContent);
  }).observe(document.getElementById("thread"),
             {childList: true, subtree: true, characterData: true});
}"""


@pytest.fixture
def page(scripted_daemon: Daemon, open_page: Open) -> Any:
    return open_page(scripted_daemon)


@pytest.mark.parametrize("pause_seconds", [0, 0.02])
@pytest.mark.parametrize(
    ("written", "summary", "around"),
    [
        (f"I click. {CALL} Done.", "Tool call that couldn't be read click", "I click. Done."),
        (
            'So: <tool_call>\n{"name": "click", "arg\n\nThat was it.',
            "Unfinished tool call click",
            "So: That was it.",
        ),
        ('Now <tool_call>{"name": "a", ', "Unfinished tool call a", "Now"),
        ('[TOOL_CALLS]{"name": "a.b"}', "Tool call that was not made a.b", ""),
        (f"```x``` {CALL}", "Tool call that couldn't be read click", "x"),
        ("<function=go><parameter=x>1", "Unfinished tool call go", ""),
        ("A blue one. </think> Two.", "Thoughts", "Two."),
        ("<think>Which one? </think>The red one.<|im_end|>", "Thoughts", "The red one."),
    ],
)
def test_broken_markup_is_folded_and_never_shown_raw(
    page: Any, written: str, summary: str, around: str, pause_seconds: float
) -> None:
    page.evaluate(WATCH)
    answer = ask(page, f"say {pause_seconds} {written}")
    folded = answer.locator(".text details.unread")
    assert folded.count() == 1
    assert folded.locator("summary").inner_text().replace("\u2019", "'") == summary
    shown = answer.locator(".text > :not(.unread)").all_inner_texts()
    assert " ".join(" ".join(shown).split()) == around
    assert not [text for text in page.evaluate("window.seen") if "<" in text or "[T" in text]


def test_folded_call_tells_its_text(page: Any) -> None:
    answer = ask(page, f"say 0 {CALL}")
    answer.locator(".unread summary").click()
    assert answer.locator(".unread pre").inner_text() == CALL[11:-12]
    answer.get_by_text("nothing was called").wait_for()
    assert accessibility_problems(page) == []
    check_that_it_fits(page)


def test_call_stays_unfolded_while_it_is_written(page: Any) -> None:
    page.get_by_role("textbox", name="Question", exact=True).fill(
        f"say 0.1 <tool_call> {' '.join('abcdefghijklmnopqrstuvwxyz')} </tool_call> End."
    )
    page.keyboard.press("Enter")
    page.get_by_text("Writing a tool call…").click()
    page.locator(".answer .figures").wait_for()
    assert page.locator(".unread pre").is_visible()


@pytest.mark.parametrize(
    "written",
    [
        "<think>Which one?\n\nPerhaps two.</think>",
        '<tool_call>{"name":\n\n"click"}</tool_call>',
        '[TOOL_CALLS] [{"name": "click"}]',
    ],
)
def test_marks_are_open_up_to_their_last_character(page: Any, written: str) -> None:
    shown = page.evaluate(
        """async (text) => {
          const {piecesOf} = await import("/page/markup.js");
          return [...text].map((_, index) => piecesOf(text.slice(0, index), false));
        }""",
        f"Red. {written}",
    )
    pieces = [piece for one in shown for piece in one]
    texts = {piece["text"] for piece in pieces if piece["kind"] == "text"}
    assert all("Red. ".startswith(text) for text in texts), texts
    assert {piece["state"] for piece in pieces if piece["kind"] != "text"} == {"open"}


def test_unfinished_call_with_text_behind_is_not_said_to_end_answer(page: Any) -> None:
    answer = ask(page, 'say 0 <tool_call>{"name": "click", "arg\n\nThat was it.')
    answer.locator(".unread summary").click()
    answer.get_by_text("It was not finished, so nothing was called.").wait_for()


@pytest.mark.parametrize("quote", ["`{}`", "```\n{}\n```", "- a\n\n  ~~~\n  {}\n  ~~~"])
def test_marks_in_code_are_shown_as_written(page: Any, quote: str) -> None:
    answer = ask(page, f"say 0 {quote.format('<tool_call> and <|im_end|>')}")
    assert answer.locator("code").inner_text().strip() == "<tool_call> and <|im_end|>"
    assert answer.locator(".unread").count() == 0
