"""The checkpoints on this machine, as operators see them: their size, and whether they fit.

The memory that a checkpoint needs is estimated from the size of its files; loading it is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_server.hub import layout
from vlm_server.hub.find import Found, every
from vlm_server.hub.names import HubName
from vlm_server.settings import Settings
from vlm_server.settings.paths import expanded
from vlm_server.supervisor.client import ModelClient
from vlm_server.supervisor.memory_shares import needed_bytes


def free_for_more(models: ModelClient, settings: Settings) -> int | None:
    """Device memory in bytes besides models that stay loaded; None while the limit is unknown."""
    memories = {
        name: stats.memory
        for name in models.names
        if (stats := models.status(name).stats) is not None
    }
    limit = settings.memory.known_limit_bytes or sum(one.limit_bytes for one in memories.values())
    pinned = [name for name in models.names if models.is_pinned(name)]
    if not limit or not memories.keys() >= set(pinned):
        return None
    room = settings.memory.model_room_bytes
    return limit - sum(needed_bytes(memories[one].baseline_bytes, room) for one in pinned)


def checkpoints(
    settings: Settings, names: tuple[str, ...], free_bytes: int | None
) -> list[dict[str, Any]]:
    """The checkpoints of vision models; models called `names` are served. Reads the disk."""
    folders = set(_served_folders(settings))
    return [
        _shown(one, settings, free_bytes, is_served=one.name in names or one.folder in folders)
        for one in every(settings.model.search_paths)
        if layout.sees(layout.read_object(one.folder / layout.CONFIG))
    ]


def _shown(
    one: Found, settings: Settings, free_bytes: int | None, *, is_served: bool
) -> dict[str, Any]:
    size = _size(one.folder)
    needed = needed_bytes(size, settings.memory.model_room_bytes)
    return {
        "name": one.name,
        "place": one.place,
        "complete": one.is_complete,
        "bytes": size,
        "needed_bytes": needed,
        "fits": None if free_bytes is None else needed <= free_bytes,
        "served": is_served,
    }


def _served_folders(settings: Settings) -> Iterator[Path]:
    """Folders of checkpoints that settings name; their models may have other names."""
    paths = {settings.model.path, *(one.path for one in settings.models.values())} - {""}
    local = [one for one in every(settings.model.search_paths) if one.is_complete]
    for path in paths:
        name = HubName.parse(path)
        same = (one.folder for one in local if name is not None and one.name == name.repo)
        yield next(same, expanded(path).absolute())


def _size(folder: Path) -> int:
    """Size of the files with weights, in bytes; 0 if they can't be read."""
    try:
        return sum(file.stat().st_size for file in layout.weight_files(folder))
    except OSError:
        return 0
