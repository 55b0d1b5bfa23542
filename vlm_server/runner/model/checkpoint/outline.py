"""What a checkpoint is, as far as that can be told without reading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from vlm_server.checkpoints.foreign import visible_files


def outline_of(path: str) -> str:
    """SHA-256 of the config, and of the names and sizes of the weight files, in folder `path`."""
    folder = Path(path)
    told = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(visible_files(folder, "*.safetensors")):
        told.update(f"{file.name} {file.stat().st_size}\n".encode())
    return told.hexdigest()
