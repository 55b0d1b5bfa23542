"""Look-up of checkpoints by name on this machine. Reads file names; downloads nothing.

Order: an existing folder, the hub's cache, LM Studio's folders, `model.search_folders`. Unreadable
folders count as missing: `os.path` says so where `Path` raises an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from huggingface_hub import constants

from vlm_server.errors import ConfigError
from vlm_server.hub import layout
from vlm_server.hub.names import HubName, is_path, repo_of_cache_folder, served_name, to_download
from vlm_server.settings import EMBEDDED_MODEL, ModelSettings
from vlm_server.settings.paths import expand_home

Place = Literal["folder", "hub cache", "LM Studio", "search path", "vlm-server"]


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint on this machine: its absolute folder, and its name in the API."""

    folder: Path
    name: str
    place: Place

    @property
    def is_complete(self) -> bool:
        return layout.is_complete(self.folder)


def find(text: str, search_folders: Sequence[str] = ()) -> LocalCheckpoint | None:
    """The complete checkpoint with this name, or the folder with this path.

    A name without `org/` is that of a folder in LM Studio's or in `search_folders`. Raises
    ConfigError if several have it.
    """
    if os.path.isdir(folder := expand_home(text)):
        return _in_folder(folder.absolute())
    return find_by_name(text, search_folders)


def find_by_name(text: str, search_folders: Sequence[str] = ()) -> LocalCheckpoint | None:
    """The complete checkpoint with this name, never a path: for names from clients."""
    if is_path(text):
        return None
    name = HubName.parse(text)
    if name is not None:
        return next(
            (checkpoint for checkpoint in _named(name, search_folders) if checkpoint.is_complete),
            None,
        )
    if "/" in text or "@" in text:
        return None
    return _single_match(
        text,
        [
            checkpoint
            for checkpoint in _local(search_folders)
            if checkpoint.name.split("/")[-1] == text
        ],
    )


def locate(model: ModelSettings) -> ModelSettings:
    """`model` with the folder of its checkpoint, and the checkpoint's name in the API.

    A hub name that is not on this machine stays as it is, for `names.to_download`. Raises
    ConfigError.
    """
    checkpoint = find(model.path, model.search_folders)
    if checkpoint is not None:
        path, name = str(checkpoint.folder), checkpoint.name
    elif (hub_name := to_download(model.path)) is not None:
        path, name = model.path, hub_name.repo
    else:
        folder = expand_home(model.path).absolute()
        path, name = str(folder), served_name(folder)
    return msgspec.structs.replace(model, path=path, name=model.name or name)


def find_all(search_folders: Sequence[str] = ()) -> list[LocalCheckpoint]:
    """All checkpoints that can be found by name, complete or not."""
    cached_checkpoints = (
        LocalCheckpoint(folder, repo, "hub cache")
        for repo, folder in _cached()
        if os.path.exists(folder / layout.CONFIG)
    )
    return [*cached_checkpoints, *_local(search_folders)]


def all_names(search_folders: Sequence[str] = ()) -> list[str]:
    """The names of `find_all`, and that of the embedded model."""
    return [EMBEDDED_MODEL, *(checkpoint.name for checkpoint in find_all(search_folders))]


def find_unfinished() -> list[LocalCheckpoint]:
    """Repositories in the hub's cache with an unfinished download."""
    repositories = ((repo_of_cache_folder(folder.name), folder) for folder in _folders(hub_cache()))
    return [
        LocalCheckpoint(folder, repo, "hub cache")
        for repo, folder in repositories
        if repo and any((folder / "blobs").glob("*.incomplete"))
    ]


def hub_cache() -> Path:
    """The folder of the hub's cache, by `HF_HUB_CACHE` and `HF_HOME`."""
    return expand_home(constants.HF_HUB_CACHE).absolute()


def lm_studio_folders(home: Path | None = None) -> list[Path]:
    """LM Studio's folders of models (`org/name`): its configured one, then its defaults."""
    home = home or expand_home("~")
    roots = [home / ".lmstudio", home / ".cache/lm-studio"]
    downloads_folder = layout.read_object(roots[0] / "settings.json").get("downloadsFolder")
    folders = (
        [Path(downloads_folder)] if isinstance(downloads_folder, str) and downloads_folder else []
    )
    folders += [root / "models" for root in roots]
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _in_folder(folder: Path) -> LocalCheckpoint:
    """The checkpoint in a folder; for a repository of the hub's cache, its snapshot."""
    if repo := repo_of_cache_folder(folder.name):
        return LocalCheckpoint(_snapshot(folder, "") or folder, repo, "folder")
    for root in lm_studio_folders():
        if folder.parent.parent == root:
            return LocalCheckpoint(folder, f"{folder.parent.name}/{folder.name}", "folder")
    return LocalCheckpoint(folder, served_name(folder), "folder")


def _named(name: HubName, search_folders: Sequence[str]) -> Iterator[LocalCheckpoint]:
    repository = _as_listed(hub_cache() / name.cache_folder)
    if (folder := _snapshot(repository, name.revision)) is not None:
        yield LocalCheckpoint(
            folder, repo_of_cache_folder(repository.name) or name.repo, "hub cache"
        )
    if not name.revision:
        yield from (
            checkpoint for checkpoint in _local(search_folders) if checkpoint.name == name.repo
        )


def _as_listed(folder: Path) -> Path:
    """`folder` under the name that its parent lists.

    A file system that folds case, as macOS's does, finds it by other letters too, and one
    checkpoint must not be served under two names.
    """
    names = [sibling.name for sibling in _folders(folder.parent)]
    if folder.name in names or not folder.exists():
        return folder
    same_folders = (
        folder.with_name(name) for name in names if folder.samefile(folder.with_name(name))
    )
    return next(same_folders, folder)


def _snapshot(repository: Path, revision: str) -> Path | None:
    """The snapshot of a revision in a `models--*` folder; without `main`, the only one."""
    snapshots = repository / "snapshots"
    try:
        commit = (repository / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    if commit:
        snapshot = snapshots / commit
        return snapshot if snapshot.is_dir() else None
    folders = _folders(snapshots)
    return folders[0] if len(folders) == 1 else None


def _cached() -> Iterator[tuple[str, Path]]:
    for repository in _folders(hub_cache()):
        repo = repo_of_cache_folder(repository.name)
        folder = _snapshot(repository, "") if repo else None
        if repo and folder is not None:
            yield repo, folder


def _local(search_folders: Sequence[str]) -> Iterator[LocalCheckpoint]:
    """Checkpoints of LM Studio and in `search_folders`, as `org/name`, `name` or `models--*`."""
    for root in lm_studio_folders():
        yield from _in_orgs(root, "LM Studio")
    for path in search_folders:
        root = expand_home(path)
        for folder in _folders(root):
            if repo := repo_of_cache_folder(folder.name):
                if (snapshot := _snapshot(folder, "")) is not None:
                    yield LocalCheckpoint(snapshot, repo, "search path")
            elif os.path.isfile(folder / layout.CONFIG):
                yield LocalCheckpoint(folder, folder.name, "search path")
        yield from _in_orgs(root, "search path")


def _in_orgs(root: Path, place: Place) -> Iterator[LocalCheckpoint]:
    for org in _folders(root):
        for folder in _folders(org):
            if os.path.isfile(folder / layout.CONFIG):
                yield LocalCheckpoint(folder, f"{org.name}/{folder.name}", place)


def _folders(root: Path) -> list[Path]:
    """The subfolders of `root`, sorted; none if it can't be read."""
    try:
        return sorted(
            path for path in root.iterdir() if os.path.isdir(path) and path.name[0] != "."
        )
    except OSError:
        return []


def _single_match(text: str, checkpoints: Iterable[LocalCheckpoint]) -> LocalCheckpoint | None:
    by_folder = {
        checkpoint.folder: checkpoint for checkpoint in checkpoints if checkpoint.is_complete
    }
    if len(by_folder) > 1:
        where = ", ".join(map(str, by_folder))
        raise ConfigError(f"{text!r} is the name of several checkpoints: {where}: give a path")
    return next(iter(by_folder.values()), None)
