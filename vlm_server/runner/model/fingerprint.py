"""Hashes a checkpoint's files and the versions of what reads them, for cache keys."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path

import vlm_server
from vlm_server.models.foreign import visible_files

_READERS = ("mlx", "mlx-vlm", "transformers", "tokenizers", "pillow", "av")
"""Packages of which another version may make other pixels, tokens or features of the same bytes."""
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model")


def fingerprint(folder: Path, dtype: str) -> str:
    """SHA-256 in hex over weights, configuration, processor and template, and the readers.

    The folder's name and location play no part. Reads every byte: a second for some 1.5 GB.
    """
    digest = hashlib.sha256(dtype.encode())
    for package in _READERS:
        digest.update(f"{package} {version(package)}\0".encode())
    for path in sorted(path for pattern in _FILES for path in visible_files(folder, pattern)):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content}\0".encode())
    return digest.hexdigest()


def state_fingerprint(checkpoint: str, device: str) -> str:
    """SHA-256 in hex over all that features and KV depend on besides the prompt.

    That is the checkpoint, by its fingerprint, the device, and this program, by its code.
    """
    digest = hashlib.sha256(f"{checkpoint}\0{device}\0{platform.machine()}\0".encode())
    package = Path(vlm_server.__path__[0])
    for path in sorted(package.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package)} {content}\0".encode())
    return digest.hexdigest()
