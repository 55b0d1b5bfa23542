"""Output of `ask`: the answer's text as it arrives, or one JSON object; and the marked image."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_server.cli.ask import regions
from vlm_server.cli.ask.conversation import ChatReply
from vlm_server.cli.client.answer import STATE_WORDS, AnswerProgress
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.text import printable, say

if TYPE_CHECKING:
    from vlm_server.cli.ask.markdown import MarkdownStream

_WAITING = "waiting for the answer"
_LONG_SECONDS = 2.0
"""Wait from which its seconds are shown."""
_THOUGHT_CHARS = 60


class AnswerScreen:
    """The answer on stdout; until its text comes, what it waits for on a terminal's stderr.

    A terminal gets Markdown, unless it `is_plain` or can't move its cursor; all else the bare text,
    unless it `is_hidden`.
    """

    def __init__(self, *, is_plain: bool = False, is_hidden: bool = False) -> None:
        self._is_hidden = is_hidden
        self._waiting = ProgressLine(sys.stderr)
        self._is_terminal = sys.stdout.isatty()
        is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        self._is_rich = self._is_terminal and not is_plain and not is_dumb
        self._markdown: MarkdownStream | None = None
        self._ends_line = True
        self._started_at = time.monotonic()
        self._thought = ""

    def wait(self) -> None:
        """Show that something is to come."""
        self._show(_WAITING, None)

    def show_progress(self, progress: AnswerProgress) -> None:
        """Show what a silent answer waits for; nothing once it has begun."""
        if self._markdown is not None or not self._ends_line or self._thought:
            return
        stage = progress.stage or STATE_WORDS.get(progress.state, _WAITING)
        fraction = progress.fraction if progress.stage else None
        if progress.state == "prefill" and progress.total:
            stage += f": {progress.done:,} of {progress.total:,} tokens"
            fraction = progress.done / progress.total
        seconds = time.monotonic() - self._started_at
        waited = f" \u00b7 {seconds:.0f} s" if seconds >= _LONG_SECONDS else ""
        self._show(stage + waited, fraction)

    def show_reasoning(self, text: str) -> None:
        """Show the end of the thought."""
        self._thought = (self._thought + text)[-1000:]
        tail = " ".join(printable(self._thought).split())[-_THOUGHT_CHARS:]
        seconds = time.monotonic() - self._started_at
        self._show(f"thinking \u00b7 {seconds:.0f} s: {tail}", None)

    def write(self, text: str) -> None:
        """Print a piece of the answer, without control characters if it goes to a terminal."""
        if self._is_hidden:
            return
        self._waiting.clear()
        text = printable(text) if self._is_terminal else text
        if self._is_rich:
            self._markdown = self._markdown or new_markdown()
            self._markdown.write(text)
            return
        print(text, end="", flush=True)
        self._ends_line = text.endswith("\n")

    def end(self) -> None:
        """End the line of an answer, complete or not."""
        self._waiting.clear()
        if self._markdown is not None:
            self._markdown.end()
        elif not self._ends_line:
            print(flush=True)
        self._markdown, self._ends_line = None, True

    def _show(self, stage: str, fraction: float | None) -> None:
        if sys.stderr.isatty():
            self._waiting.show(stage, fraction)


def new_markdown() -> MarkdownStream:
    """The Markdown of one answer on stdout."""
    from rich.console import Console  # slow to import, and not needed in a pipe

    from vlm_server.cli.ask.markdown import THEME, MarkdownStream

    return MarkdownStream(Console(file=sys.stdout, theme=THEME, highlight=False))


def print_end(
    reply: ChatReply, save_boxes: Path | None, *, is_quiet: bool = False, advice: str = ""
) -> None:
    """Print notes after an answer: that it was cut off, and its image with regions.

    `is_quiet`: only write `save_boxes`. `advice` is how to allow longer answers. Raises
    CommandFailed if no regions were found to write.
    """
    if reply.finish_reason == "length" and not is_quiet:
        say(f"(cut off at the longest answer allowed: {advice})")
    can_show = sys.stdout.isatty() and not is_quiet
    protocol = regions.protocol_of(os.environ) if can_show else None
    if reply.regions and reply.image is not None and (protocol or save_boxes):
        image = regions.draw_regions(reply.image.data, reply.regions)
        if protocol is not None:
            columns = shutil.get_terminal_size().columns
            print(regions.sequence(image, protocol, columns), end="", flush=True)
        if save_boxes is not None:
            regions.save(image, save_boxes)
    elif save_boxes is not None:
        raise CommandFailed(f"{save_boxes} was not written: the answer has no boxes or points")


def figures(reply: ChatReply) -> str:
    """The figures of an answer in one line, as far as they are known."""
    usage, rate, first = reply.usage, reply.tokens_per_second, reply.first_text_seconds
    parts = []
    if usage.prompt_tokens is not None:
        cached = f" ({usage.cached_tokens:,} of them known)" if usage.cached_tokens else ""
        parts.append(f"{usage.prompt_tokens:,} tokens read{cached}")
    if usage.completion_tokens is not None:
        parts.append(f"{usage.completion_tokens:,} written")
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if first is not None:
        parts.append(f"first text after {first:.2f} s")
    return " \u00b7 ".join([*parts, f"{reply.total_seconds:.2f} s in all"])


def as_json(reply: ChatReply) -> str:
    """Answer as one JSON object; `regions` in pixels of the last image."""
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens")
    answer_json: dict[str, Any] = {
        "model": reply.model,
        "answer": reply.text,
        **({"reasoning": reply.reasoning} if reply.reasoning else {}),
        "finish_reason": reply.finish_reason,
        "usage": {name: getattr(reply.usage, name) for name in counts},
        "timings": {
            "first_text_seconds": _round(reply.first_text_seconds),
            "total_seconds": _round(reply.total_seconds),
            "tokens_per_second": _round(reply.tokens_per_second),
        },
        "regions": _regions(reply),
    }
    return json.dumps(answer_json, ensure_ascii=False)


def _regions(reply: ChatReply) -> list[dict[str, Any]]:
    if not reply.regions or reply.image is None:
        return []
    width, height = regions.upright_size(reply.image.data)
    scales = {"x": width, "y": height, "width": width, "height": height}
    regions_json = []
    for region in reply.regions:
        sizes = {name: round(getattr(region, name) * size, 1) for name, size in scales.items()}
        regions_json.append({"kind": region.kind, **sizes, "label": region.label})
    return regions_json


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
