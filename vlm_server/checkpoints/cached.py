"""Removes models from the hub's cache: what its own tools would remove, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.utils import DeleteCacheStrategy  # type: ignore[attr-defined]

from vlm_server.checkpoints.find import hub_cache
from vlm_server.checkpoints.names import HubName


@dataclass(frozen=True, slots=True)
class Removal:
    """What would go: `paths`, with partial downloads that nothing else needs."""

    strategy: DeleteCacheStrategy
    partial: tuple[Path, ...]

    @property
    def size_bytes(self) -> int:
        partial = sum(path.stat().st_size for path in self.partial)
        return int(self.strategy.expected_freed_size) + partial

    @property
    def paths(self) -> list[Path]:
        kinds = (self.strategy.repos, self.strategy.snapshots, self.strategy.refs)
        return sorted(path for kind in kinds for path in kind)

    def execute(self) -> None:
        self.strategy.execute()
        for path in self.partial:
            path.unlink(missing_ok=True)


def removal(name: HubName) -> Removal | None:
    """How `name` is removed: all revisions of it, or the one that it names. None if it has none."""
    try:
        cache = scan_cache_dir(hub_cache())
    except CacheNotFound:
        return None
    for repo in cache.repos:
        if repo.repo_type == "model" and repo.repo_id == name.repo:
            commits = [
                revision.commit_hash
                for revision in repo.revisions
                if not name.revision or name.revision in (revision.commit_hash, *revision.refs)
            ]
            strategy = cache.delete_revisions(*commits)
            is_all = repo.repo_path in strategy.repos
            blobs = repo.repo_path / "blobs"
            partial = () if is_all or not commits else tuple(blobs.glob("*.incomplete"))
            return Removal(strategy, partial) if commits else None
    return None
