"""Output of `ask`: the answer's text as it arrives, or one JSON object; and the marked image."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from vlm_server.cli.ask import regions
from vlm_server.cli.ask.conversation import ChatReply
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.text import printable

_MIN_PIECES = 8
_WAITING = "waiting for the answer"


class Screen:
    """The answer on stdout; a spinner on a terminal's stderr until the first text."""

    def __init__(self) -> None:
        self._waiting = ProgressLine(sys.stderr)
        self._is_terminal = sys.stdout.isatty()
        self._ends_line = True

    def wait(self) -> None:
        """Show the spinner."""
        if sys.stderr.isatty():
            self._waiting.show(_WAITING, None)

    def write(self, text: str) -> None:
        """Print a piece of the answer, without control characters if it goes to a terminal."""
        self._waiting.clear()
        print(printable(text) if self._is_terminal else text, end="", flush=True)
        self._ends_line = text.endswith("\n")

    def end(self) -> None:
        """End the line of an answer, complete or not."""
        self._waiting.clear()
        if not self._ends_line:
            print(flush=True)
        self._ends_line = True


def print_end(reply: ChatReply, save_boxes: Path | None, *, is_quiet: bool = False) -> None:
    """Print notes after an answer: that it was cut off, and its image with regions.

    `is_quiet`: only write `save_boxes`. Raises CommandFailed if no regions were found to write.
    """
    if reply.finish_reason == "length" and not is_quiet:
        print("(cut off at the longest answer allowed: --max-tokens)", file=sys.stderr)
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
            "tokens_per_second": _round(_rate(reply)),
        },
        "regions": _regions(reply),
    }
    return json.dumps(answer_json, ensure_ascii=False)


def _rate(reply: ChatReply) -> float | None:
    """Tokens per second after the first; None for an answer in too few pieces to measure."""
    if reply.first_text_seconds is None or reply.num_pieces < _MIN_PIECES:
        return None
    tokens, seconds = reply.usage.completion_tokens, reply.total_seconds - reply.first_text_seconds
    return (tokens - 1) / seconds if tokens and seconds > 0 else None


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
