"""Markdown on a terminal while it is written: finished blocks are printed once and scroll away, the
last one is drawn again as it grows.

Nothing of an answer is lost: HTML is text, line breaks stay, links show where they lead, and
backslashes stay, for they are formulas more often than escapes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.theme import Theme

from vlm_server.cli.text import printable

_MAX_COLUMNS = 100
_DRAW_SECONDS = 0.06
_DRAWING_SHARE = 0.1
"""The largest share of the time that drawing may take."""
_MIN_BLOCK_CHARS = 9
"""Text of a block from which its kind is known: `2.` may still become an item of the list above."""
_SPARE_LINES = 2
THEME = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.code": "cyan",
        "markdown.code_block": "none",
        "markdown.block_quote": "dim",
    }
)
_parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_parser.disable("escape")
_block_parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("inline")


class _LeftHeading(Heading):
    """A heading that begins at the left, as the text below it does."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _BareCode(CodeBlock):
    """Code in the terminal's own colours, without a margin: it is copied as it is."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme="ansi_dark", word_wrap=True)


class AnswerMarkdown(Markdown):
    """An answer's Markdown."""

    elements = {  # noqa: RUF012  as in the base class
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _BareCode,
        "code_block": _BareCode,
    }

    def __init__(self, text: str) -> None:
        super().__init__("")
        self.parsed = _parser.parse(text)
        for token in self.parsed:
            if token.children:
                token.children = list(_shown(token.children))


def _shown(children: Sequence[Token]) -> Iterator[Token]:
    """The tokens of a line, with links and images as text, and all its breaks."""
    links: list[tuple[str, str]] = []
    for token in children:
        if token.type == "link_open":
            links.append((str(token.attrs.get("href", "")), ""))
        elif token.type == "link_close" and links:
            address, text = links.pop()
            if text != address:
                yield Token("text", "", 0, content=f" ({address})")
        elif token.type == "softbreak":
            yield Token("hardbreak", "br", 0)
        elif token.type == "image":
            yield Token("text", "", 0, content=f"![{token.content}]({token.attrs.get('src', '')})")
        else:
            links = [(address, text + token.content) for address, text in links]
            yield token


class _Lines:
    """Lines that were rendered before. Others may take their place while they are shown."""

    def __init__(self, lines: Sequence[list[Segment]] = ()) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()


class MarkdownStream:
    """The Markdown of one answer on a terminal's `console`; used on an event loop until `end`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = _Lines()
        self._live = Live(
            self._shown,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tail = ""
        """The text of the last block."""
        self._is_first = True
        self._timer: asyncio.TimerHandle | None = None
        self._draw_seconds = _DRAW_SECONDS

    def write(self, text: str) -> None:
        """Add a piece. It is drawn soon, with those that come until then."""
        self._tail += text
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._draw_seconds, self.draw)

    def end(self) -> None:
        """Print what is not printed yet."""
        self._cancel_timer()
        self._live.stop()
        self._print(blocks_of(self._tail))
        self._tail = ""

    def draw(self) -> None:
        """Print finished blocks, and draw the last one below them."""
        self._cancel_timer()
        started = time.perf_counter()
        *finished, self._tail = blocks_of(self._tail)
        lines = _apart(self._render(self._tail), self._is_first and not finished)
        self._shown.lines = lines[-max(1, self._console.height - _SPARE_LINES) :]
        self._live.start()
        if finished:
            self._print(finished)  # which draws the rest below it
        else:
            self._live.refresh()
        elapsed = time.perf_counter() - started
        self._draw_seconds = max(_DRAW_SECONDS, elapsed / _DRAWING_SHARE)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _print(self, blocks: Sequence[str]) -> None:
        for block in blocks:
            if lines := self._render(block):
                self._console.print(_Lines(_apart(lines, self._is_first)), end="")
                self._is_first = False

    def _render(self, text: str) -> list[list[Segment]]:
        """The lines of `text`, without blanks at their ends."""
        columns = min(self._console.width, _MAX_COLUMNS)
        options = self._console.options.update(width=columns, height=None)
        lines = self._console.render_lines(AnswerMarkdown(text), options, pad=False)
        stripped = [_strip(line) for line in lines] if text.strip() else []
        filled = [number for number, line in enumerate(stripped) if line]
        return stripped[filled[0] : filled[-1] + 1] if filled else []


def _apart(lines: list[list[Segment]], is_first: bool) -> list[list[Segment]]:
    """`lines` below an empty one, unless they come first."""
    return lines if is_first or not lines else [[], *lines]


def blocks_of(text: str) -> list[str]:
    """The parts of `text` that are rendered one by one; the last one may still grow.

    What is too short to be known stays in one part with the block before it.
    """
    tokens = _block_parser.parse(text)
    lines = text.split("\n")
    starts = [token.map[0] for token in tokens if token.map and token.level == 0]
    if len(starts) > 1 and len("\n".join(lines[starts[-1] :]).strip()) < _MIN_BLOCK_CHARS:
        starts.pop()
    edges = [0, *starts[1:], len(lines)]
    return ["\n".join(lines[start:end]) for start, end in pairwise(edges)]


def _strip(line: list[Segment]) -> list[Segment]:
    """`line` without blanks at its end, which a copy of the text would have, and control codes."""
    kept = [Segment(printable(text), style) for text, style, _ in line]
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept
