"""Names of checkpoints: `org/name` or `org/name@revision` on the hub, or a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PATH_STARTS = ("/", "./", "../", "~")
_CACHED = "models--"
"""The prefix of a model's folder in the hub's cache; `--` stands for the slash."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,249}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub. `revision` is a branch, a tag or a commit; empty means `main`."""

    repo: str
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The hub name in `text`; None if it can only be a path."""
        repo, at, revision = text.partition("@")
        parts = repo.split("/")
        is_name = len(parts) == 2 and all(map(_is_part, parts))
        if not is_name or (at and not _is_revision(revision)):
            return None
        return cls(repo, revision)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def cache_folder(self) -> str:
        """The name of the repository's folder in the hub's cache."""
        return _CACHED + self.repo.replace("/", "--")


def is_path(text: str) -> bool:
    """Whether `text` is written as a path, whatever is on the disk."""
    return text.startswith(_PATH_STARTS) or text == "."


def repo_of_cache_folder(name: str) -> str | None:
    """`org/name` for `models--org--name`; None for other names."""
    return name.removeprefix(_CACHED).replace("--", "/") if name.startswith(_CACHED) else None


def to_download(path: str) -> HubName | None:
    """The hub name in a `model.path` that `find` did not find; None for a path."""
    return None if is_path(path) else HubName.parse(path)


def served_name(folder: Path) -> str:
    """The name in the API of the checkpoint in an absolute `folder`.

    A snapshot of the hub's cache has its repository's name, never its commit.
    """
    for candidate in (
        folder,
        folder.parent.parent if folder.parent.name == "snapshots" else folder,
    ):
        if repo := repo_of_cache_folder(candidate.name):
            return repo
    return folder.name


def _is_part(text: str) -> bool:
    """The hub's rule: https://huggingface.co/docs/hub/repositories-getting-started."""
    has_double = "--" in text or ".." in text
    return _PART.fullmatch(text) is not None and not has_double and text[-1] not in "-."


def _is_revision(text: str) -> bool:
    return _REVISION.fullmatch(text) is not None and ".." not in text
