"""What the process that downloads tells the one that started it: one JSON object a line.

It begins with a `Plan`, and fetches no weights until it is told `GO`.
"""

from __future__ import annotations

from typing import Any

import msgspec

GO = b"go\n"


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """What a download will do. `commit` is the only revision that is read.

    `parameters` counts the numbers in the weights by their type in safetensors, as far as the hub
    knows. `missing_bytes` are still to come; all that is read has `total_bytes`.
    """

    repo: str
    commit: str
    config: dict[str, Any]
    files: tuple[str, ...]
    parameters: dict[str, int]
    weight_bytes: int
    total_bytes: int
    missing_bytes: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """`file` is the largest of those under way. `is_waiting` while another process downloads it."""

    file: str
    done_bytes: int
    total_bytes: int
    is_waiting: bool = False

    @property
    def fraction(self) -> float:
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0

    def __str__(self) -> str:
        if self.is_waiting:
            return "waiting for another process that downloads it"
        done, total = size_text(self.done_bytes), size_text(self.total_bytes)
        return f"downloading {self.file}: {done} of {total}"


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All files are here and verified, in `folder`."""

    folder: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The download ended. `may_pass`: another try, later, may succeed without any change."""

    reason: str
    may_pass: bool = False


Message = Plan | Progress | Done | Refused


def size_text(num_bytes: float) -> str:
    """A size as people read it, in decimal units as the hub shows them."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
