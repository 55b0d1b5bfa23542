"""Removes models from the hub's cache: what its own tools would remove, and no more."""

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
    """What would go: what the cache's own `strategy` removes, or the `paths` of what it ignores."""

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
    """How `name` is removed: all revisions of it, or the one that it names. None if it has none."""
    try:
        cache = scan_cache_dir(hub_cache())
    except CacheNotFound:
        return None
    for repo in cache.repos:
        if repo.repo_type == "model" and repo.repo_id == name.repo and repo.revisions:
            return _of_revisions(cache, repo, name.revision)
    folder = hub_cache() / name.cache_folder
    is_whole = not name.revision and folder.is_dir() and not folder.is_symlink()
    return _of_parts(folder) if is_whole else None


def _of_revisions(cache: HFCacheInfo, repo: CachedRepoInfo, wanted: str) -> Removal | None:
    commits = [
        revision.commit_hash
        for revision in repo.revisions
        if not wanted or wanted in (revision.commit_hash, *revision.refs)
    ]
    if not commits:
        return None
    alone = replace(cache, repos=frozenset((repo,)))  # a copy of it has the same commits
    strategy = alone.delete_revisions(*commits)
    kinds = (strategy.repos, strategy.snapshots, strategy.refs)
    paths = tuple(sorted(path for kind in kinds for path in kind))
    return Removal(strategy, paths, int(strategy.expected_freed_size))


def _of_parts(folder: Path) -> Removal:
    """A repository of which no revision is complete: the cache's tools take it for damaged."""
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    return Removal(None, (folder,), size)
