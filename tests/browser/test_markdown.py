"""Answers as Markdown: what is shown, that nothing in them does harm, and that it is quick."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.files import ask
from tests.support.daemons import Daemon

TEXT = """# Shapes

A **bold** word, `code`, $e^{i\\pi}$ for $5, and \\(a_1\\). See https://example.org/a.

1. first
   - inner
2. second

> quoted

| name | count |
|:-----|------:|
| star |     2 |

```python
def area(side):  # of a square
    return side ** 2
```

$$
\\frac{1}{2}
$$
"""
HOSTILE = """<img src=x onerror="window.ran = 1"> <script>window.ran = 1</script>

[a](javascript:window.ran=1) [b](data:text/html,x) [c](JaVaScRiPt:1) [d](vbscript:1)
[e](/v1/models)

![f](https://evil.example/track.png) <javascript:window.ran=1>
[g](https://example.org/"onclick="x)

$\\href{javascript:window.ran=1}{x}$ $\\includegraphics{https://evil.example/y.png}$
$\\def\\a{\\a\\a}\\a$

```html
<script>window.ran = 1</script>
```
"""
MAX_ELEMENTS = 25_000


def say(page: Any, text: str, pause_seconds: float = 0) -> Any:
    """The answer, which is `text`."""
    return ask(page, f"say {pause_seconds} {text}")


@pytest.fixture
def page(scripted_daemon: Daemon, open_page: Open) -> Any:
    return open_page(scripted_daemon)


@pytest.mark.parametrize("pause_seconds", [0, 0.01])
def test_markdown_becomes_elements_while_it_is_written(page: Any, pause_seconds: float) -> None:
    answer = say(page, TEXT, pause_seconds)
    text = answer.locator(".text")
    assert text.locator("h3").inner_text() == "Shapes"
    assert text.locator("strong").inner_text() == "bold"
    assert text.locator("ol > li").count() == 2
    assert text.locator("ol ul li").inner_text() == "inner"
    assert text.locator("blockquote").inner_text() == "quoted"
    assert text.locator("tbody td").all_inner_texts() == ["star", "2"]
    assert text.locator("td").last.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    link = text.get_by_role("link")
    assert link.get_attribute("href") == "https://example.org/a"
    assert "noopener" in str(link.get_attribute("rel"))
    text.locator("math").nth(2).wait_for()
    assert text.locator("math").count() == 3
    assert text.locator("mfrac").count() == 1
    assert "for $5, and" in text.inner_text()
    text.locator(".c-keyword").first.wait_for()
    assert text.locator(".c-comment").inner_text() == "# of a square"
    text.locator("figure").get_by_role("button", name="Copy").click()
    text.get_by_text("Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "def area(side):  # of a square\n    return side ** 2\n"


def test_hostile_answer_does_no_harm(page: Any) -> None:
    answer = say(page, HOSTILE)
    text = answer.locator(".text")
    assert text.locator("img, script, iframe, object, embed, style, form").count() == 0
    links = text.locator("a").evaluate_all("links => links.map((link) => link.href)")
    assert len(links) == 2
    assert all(link.startswith("https://") for link in links)
    assert text.locator("[onclick], [onerror], [style*=url]").count() == 0
    assert page.evaluate("window.ran") is None
    assert "<script>window.ran = 1</script>" in text.inner_text()


@pytest.mark.parametrize(
    "text",
    [
        "|a" * 300 + "|\n" + "|-" * 300 + "|\n" + ("|1" * 300 + "|\n") * 400,
        ">" * 5_000 + " deep",
        "* " * 3_000 + "deep",
        "[" * 20_000,
        "*a " * 20_000,
        "`" * 20_000,
        "$a$ " * 2_000,
        "x" * 200_000,
    ],
    ids=["table", "quotes", "lists", "brackets", "stars", "ticks", "formulas", "line"],
)
def test_excessive_answer_is_shown_whole_and_page_stays_alive(page: Any, text: str) -> None:
    started = time.monotonic()
    answer = say(page, text)
    assert time.monotonic() - started < 15
    shown = answer.locator(".text")
    assert shown.evaluate("text => text.querySelectorAll('*').length") < MAX_ELEMENTS
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    letters = [letter for letter in text if letter.isalnum()]
    written = shown.evaluate("text => text.textContent")
    assert len([letter for letter in written if letter.isalnum()]) >= len(letters)


def test_answer_of_json_is_shown_as_written(page: Any) -> None:
    from playwright.sync_api import expect

    text = '[{"count": 12345678901234567890, "share": 1.0}]'
    shown = say(page, text).locator(".text figure.code")
    assert shown.locator("pre").inner_text() == text
    expect(shown.locator(".c-attr")).to_have_count(2)  # colours come when their code is loaded


def test_blocks_stay_in_place_while_more_is_written(page: Any) -> None:
    """What a reader has selected stays selected."""
    page.get_by_role("textbox", name="Question", exact=True).fill(
        "say 0.1 first words here\n\nsecond one has many more words than the first one had"
    )
    page.keyboard.press("Enter")
    page.locator(".answer .text p").nth(1).wait_for()
    page.evaluate("window.first = document.querySelector('.answer .text p')")
    page.locator(".answer .figures").wait_for()
    assert page.evaluate("window.first.isConnected")


def test_unreadable_formula_stays_in_its_line_as_written(page: Any) -> None:
    formula = say(page, "So $\\frac{1}$ it is.").locator(".formula.unread")
    formula.wait_for()
    assert formula.inner_text() == "\\frac{1}"
    style = "one => [getComputedStyle(one).padding, getComputedStyle(one).borderStyle]"
    assert formula.evaluate(style) == ["0px", "none"]
