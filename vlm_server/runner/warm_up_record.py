"""The record on disk that a model was warmed up here: its kernels are compiled, and it can answer.

It lies among MLX's compiled kernels, so that who removes those removes it, too.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from importlib.metadata import version
from pathlib import Path

from vlm_server.settings import ModelSettings

logger = logging.getLogger(__name__)

_FOLDER = "warmed-up"
_PACKAGES = ("mlx", "mlx-vlm", "vlm-server")


class WarmUpRecord:
    """The record of one model on one device, by versions, configuration and type of weights."""

    def __init__(self, settings: ModelSettings, device_name: str) -> None:
        config = (Path(settings.path) / "config.json").read_bytes()
        versions = tuple(version(name) for name in _PACKAGES)
        key = hashlib.sha256(repr((versions, device_name, str(settings.dtype), config)).encode())
        self._path = Path(tempfile.gettempdir(), "mlx", _FOLDER, key.hexdigest())

    def exists(self) -> bool:
        return self._path.exists()

    def write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            logger.warning("the next start will warm up at length again: %s", error)
