"""Removal of models from the hub's cache: the same files that the cache's own tools remove."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    CachedRepoInfo,
    DeleteCacheStrategy,
    HFCacheInfo,
)

from vlm_server.hub.find import hub_cache
from vlm_server.hub.names import HubName


@dataclass(frozen=True, slots=True)
class Removal:
    """The files to remove: those of the cache's own `strategy`, or `paths` that it ignores."""

    strategy: DeleteCacheStrategy | None
    paths: tuple[Path, ...]
    size_bytes: int

    def execute(self) -> None:
        if self.strategy is not None:
            self.strategy.execute()
            return
        for path in self.paths:
            shutil.rmtree(path)


def removal(name: HubName) -> Removal | None:
    """The removal of all revisions of `name`, or of the one in it; None if there are none."""
    try:
        cache = scan_cache_dir(hub_cache())
    except CacheNotFound:
        return None
    for repo in cache.repos:
        if repo.repo_type == "model" and repo.repo_id == name.repo and repo.revisions:
            return _of_revisions(cache, repo, name.revision)
    folder = hub_cache() / name.cache_folder
    is_whole = not name.revision and folder.is_dir() and not folder.is_symlink()
    return _of_partial(folder) if is_whole else None


def _of_revisions(cache: HFCacheInfo, repo: CachedRepoInfo, name: str) -> Removal | None:
    commits = [
        revision.commit_hash
        for revision in repo.revisions
        if not name or name in (revision.commit_hash, *revision.refs)
    ]
    if not commits:
        return None
    alone = replace(cache, repos=frozenset((repo,)))  # a copy of it has the same commits
    strategy = alone.delete_revisions(*commits)
    kinds = (strategy.repos, strategy.snapshots, strategy.refs)
    paths = tuple(sorted(path for kind in kinds for path in kind))
    return Removal(strategy, paths, int(strategy.expected_freed_size))


def _of_partial(folder: Path) -> Removal:
    """The removal of a repository without a complete revision, damaged for the cache's tools."""
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    return Removal(None, (folder,), size)
