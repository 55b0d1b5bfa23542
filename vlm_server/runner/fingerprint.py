"""Names a checkpoint by its files and by what reads them. Knows files; loads nothing."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

_READERS = ("mlx", "mlx-vlm", "transformers", "tokenizers", "pillow", "av")
"""Packages whose next version may make other pixels, tokens or features of the same bytes."""
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model")


def fingerprint(folder: Path, dtype: str) -> str:
    """SHA-256 in hex over weights, configuration, processor and template, and the readers.

    The name and place of the folder play no part. Reads every byte: a second for some 1.5 GB.
    """
    digest = hashlib.sha256(dtype.encode())
    for package in _READERS:
        digest.update(f"{package} {version(package)}\0".encode())
    for path in sorted(path for pattern in _FILES for path in folder.glob(pattern)):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content}\0".encode())
    return digest.hexdigest()
