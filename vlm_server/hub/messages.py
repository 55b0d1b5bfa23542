"""The messages of the download process to its parent: one JSON object a line.

The first is a `DownloadPlan`; no weights are downloaded until the parent answers `GO`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vlm_server.sizes import file_size

GO = b"go\n"


class DownloadPlan(msgspec.Struct, frozen=True, tag="plan"):
    """A download plan: which files of the only revision that is read, `commit`.

    `parameters` counts the weights by their safetensors type, as far as the hub knows.
    `total_bytes` is the size of `files`, `missing_bytes` what of that is not in the cache yet.
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
    """The state of a download. `file` is the largest of those under way; `is_waiting` while another
    process downloads the same repository."""

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
        done_text, total_text = file_size(self.done_bytes), file_size(self.total_bytes)
        return f"downloading {self.file}: {done_text} of {total_text}"


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The end of a download: all files are verified, in `folder`."""

    folder: str


class DownloadRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The failure of a download, and what to do about it. `may_pass`: a later try may succeed."""

    reason: str
    may_pass: bool = False
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.advice}" if self.advice else self.reason


class FoundModel(msgspec.Struct, frozen=True):
    """A checkpoint that a search has found. `weight_bytes`: computed from the numbers of its
    weights by type; 0 if the hub does not tell these."""

    name: str
    model_type: str
    weight_bytes: int
    downloads: int
    is_gated: bool


class SearchResult(msgspec.Struct, frozen=True):
    """The end of a search; `refusal` says why there is none, for people."""

    models: tuple[FoundModel, ...]
    refusal: str = ""


Message = DownloadPlan | Progress | Done | DownloadRefused
