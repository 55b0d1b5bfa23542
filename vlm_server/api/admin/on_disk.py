"""The checkpoints on this machine, as operators see them: their size, and whether they fit.

The memory that a checkpoint needs is estimated from the size of its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_server.hub import layout
from vlm_server.hub.find import LocalCheckpoint, find_all
from vlm_server.hub.names import HubName
from vlm_server.settings import Settings
from vlm_server.settings.paths import expand_home
from vlm_server.supervisor.engine_process.client import ModelClient
from vlm_server.supervisor.models.memory_shares import needed_bytes


def free_bytes_for_models(models: ModelClient, settings: Settings) -> int | None:
    """Device memory in bytes not used by pinned models; None while the limit is unknown."""
    memories = {
        name: stats.memory
        for name in models.names
        if (stats := models.status(name).stats) is not None
    }
    limits = (memory.limit_bytes for memory in memories.values())
    limit = settings.memory.known_limit_bytes or sum(limits)
    bases = [name for name in models.names if models.base(name) is None]
    pinned = [name for name in bases if models.is_pinned(name)]
    if not limit or not memories.keys() >= set(pinned):
        return None
    room = settings.memory.min_model_room_bytes
    return limit - sum(needed_bytes(memories[name].baseline_bytes, room) for name in pinned)


def checkpoints(
    settings: Settings, names: tuple[str, ...], free_bytes: int | None
) -> list[dict[str, Any]]:
    """The checkpoints of language models; models called `names` are served. Reads the disk."""
    folders = set(_served_folders(settings))
    return [
        _checkpoint_json(
            checkpoint,
            settings,
            free_bytes,
            is_served=checkpoint.name in names or checkpoint.folder in folders,
        )
        for checkpoint in find_all(settings.model.search_folders)
        if layout.is_language_model(layout.read_object(checkpoint.folder / layout.CONFIG))
    ]


def _checkpoint_json(
    checkpoint: LocalCheckpoint, settings: Settings, free_bytes: int | None, *, is_served: bool
) -> dict[str, Any]:
    size = _size(checkpoint.folder)
    needed_for_model = needed_bytes(size, settings.memory.min_model_room_bytes)
    return {
        "name": checkpoint.name,
        "place": checkpoint.place,
        "complete": checkpoint.is_complete,
        "bytes": size,
        "needed_bytes": needed_for_model,
        "fits": None if free_bytes is None else needed_for_model <= free_bytes,
        "served": is_served,
    }


def _served_folders(settings: Settings) -> Iterator[Path]:
    """Folders of checkpoints that settings name; their models may have other names."""
    paths = {settings.model.path, *(model.path for model in settings.models.values())} - {""}
    local_checkpoints = [
        checkpoint
        for checkpoint in find_all(settings.model.search_folders)
        if checkpoint.is_complete
    ]
    for path in paths:
        name = HubName.parse(path)
        folders = (
            checkpoint.folder
            for checkpoint in local_checkpoints
            if name is not None and checkpoint.name == name.repo
        )
        yield next(folders, expand_home(path).absolute())


def _size(folder: Path) -> int:
    """Size of the files with weights, in bytes; 0 if they can't be read."""
    try:
        return sum(file.stat().st_size for file in layout.weight_files(folder))
    except OSError:
        return 0
