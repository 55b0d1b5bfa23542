"""Where the processes of one model are, if there are several."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vlm_server import settings


class Rank(msgspec.Struct, frozen=True):
    """One of `size` processes, and how it meets the others.

    backend: MLX's, `ring`, `jaccl` or `nccl`.
    environment, and files, whose paths become the values of the variables that name them: what
    MLX reads. Rank 0 listens for the others at `host` and `port`; all show each other `secret`.
    """

    number: int
    size: int
    backend: str
    environment: Mapping[str, str]
    files: Mapping[str, str]
    host: str
    port: int
    secret: str
    log: settings.Log

    def enter(self) -> None:
        """Set this process's environment; to be called before MLX is imported."""
        os.environ.update(self.environment)

    @contextmanager
    def with_files(self) -> Iterator[None]:
        """The files that the environment names, for as long as MLX reads them."""
        with tempfile.TemporaryDirectory(prefix="vlm-server-") as folder:
            paths = {name: Path(folder) / name for name in self.files}
            for name, path in paths.items():
                path.write_text(self.files[name])
                os.environ[name] = str(path)
            yield
