"""Markdown that is drawn while it is written: nothing is lost, and what was printed stays."""

from __future__ import annotations

import asyncio
import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.support.terminal import CONTROL
from vlm_server.cli.ask import markdown
from vlm_server.cli.ask.markdown import THEME, AnswerMarkdown, MarkdownStream, blocks_of

ANSWER = """\
# Receipt

Two **lines**
of text, <b>not</b> HTML, \\(x^2\\) and [a site](https://example.com/a).

| item | price |
|---|---:|
| Coffee | 3.20 |

1. one

2. two

```python
print("1 * 2")  # a comment
```

Last.
"""


def console_of(file: io.StringIO, rows: int = 24) -> Console:
    return Console(
        file=file, theme=THEME, force_terminal=True, width=60, height=rows, color_system=None
    )


def rendered(text: str) -> str:
    file = io.StringIO()
    console_of(file).print(AnswerMarkdown(text))
    return "\n".join(line.rstrip() for line in CONTROL.sub("", file.getvalue()).split("\n"))


def streamed(pieces: list[str], rows: int = 24) -> str:
    """What stands on the terminal in the end; each piece is drawn at once."""
    import pyte

    file = io.StringIO()

    async def run() -> None:
        stream = MarkdownStream(console_of(file, rows))
        for piece in pieces:
            stream.write(piece)
            stream.draw()
        stream.end()

    asyncio.run(run())
    screen = pyte.HistoryScreen(60, rows, history=1000)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    above = ["".join(line[x].data for x in range(60)) for line in screen.history.top]
    return "\n".join(line.rstrip() for line in [*above, *screen.display]).strip("\n")


def test_answer_keeps_lines_html_formulas_and_addresses() -> None:
    shown = rendered(ANSWER)
    assert "Two lines\nof text, <b>not</b> HTML, \\(x^2\\) and a site\n" in shown
    assert "(https://example.com/a)" in shown
    assert 'print("1 * 2")  # a comment\n' in shown
    assert "https://example.com/b." in rendered("See <https://example.com/b>.")
    assert rendered("See <https://example.com/b>.").count("example") == 1
    assert "![alt](https://example.com/c.png)" in rendered("![alt](https://example.com/c.png)")


@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize("size", [1, 3, 17, 1000])
def test_streamed_answer_ends_as_whole_answer(size: int, rows: int) -> None:
    """Also where a block is taller than the terminal."""
    answer = ANSWER + "\n```\n" + "".join(f"line {n}\n" for n in range(30)) + "```\n\nEnd."
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    assert streamed(pieces, rows) == streamed([answer], rows)
    assert streamed([answer], rows).count("line 29") == 1


def test_finished_blocks_are_parted_from_growing_one() -> None:
    assert blocks_of("One.\n\nTwo") == ["One.\n\nTwo"]
    assert blocks_of("One.\n\nTwo is known.") == ["One.\n", "Two is known."]
    for whole in (
        "```\na\n\nb and more text",
        "- a\n\n  continued text",
        "1. a\n\n2. another item",
        "One.\ntwo\n",
        "",
    ):
        assert blocks_of(whole) == [whole]


@given(st.text(alphabet="ab-1.#`>| \n\t", max_size=60))
def test_blocks_make_up_whole_text(text: str) -> None:
    assert "\n".join(blocks_of(text)) == text


@settings(max_examples=60)
@given(st.text(max_size=80))
def test_control_characters_never_reach_terminal(text: str) -> None:
    shown = streamed([text])
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


def test_character_references_cannot_control_terminal() -> None:
    file = io.StringIO()

    async def run() -> None:
        stream = MarkdownStream(console_of(file))
        stream.write("&#27;]0;pwned&#7; &#x9b;1m")
        stream.end()

    asyncio.run(run())
    assert "\x1b]" not in file.getvalue()
    assert not {"\x07", "\x9b"} & set(file.getvalue())


@settings(max_examples=60)
@given(st.lists(st.sampled_from(ANSWER.split("\n")), max_size=12), st.integers(1, 40))
def test_any_order_of_blocks_keeps_all_words(lines: list[str], size: int) -> None:
    answer = "\n".join(lines)
    shown = streamed([answer[at : at + size] for at in range(0, len(answer), size)])
    for word in ("Receipt", "Coffee", "comment", "Last"):
        assert (word in shown) is (word in answer)


def test_drawing_takes_small_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower it is, the more rarely it happens."""
    times = iter([0.0, 0.5])
    monkeypatch.setattr(markdown.time, "perf_counter", lambda: next(times))

    async def run() -> float:
        stream = MarkdownStream(console_of(io.StringIO()))
        stream.write("One.")
        stream.draw()
        return stream._draw_seconds

    assert asyncio.run(run()) == pytest.approx(5.0)
