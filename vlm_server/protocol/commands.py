"""The front's commands to an engine, and the ranks of a model in several processes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vlm_server import settings
from vlm_server.protocol.request import Submit


class Rank(msgspec.Struct, frozen=True):
    """One of `size` processes of a model, and its connection to the others.

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


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first command: what to load and how to run it; `rank` if several processes do.

    adapters: the folders of LoRA adapters, by name.
    """

    model: settings.ModelSettings
    scheduler: settings.SchedulerSettings
    engine: settings.EngineSettings
    log: settings.Log
    memory: settings.MemorySettings = settings.MemorySettings()
    image: settings.ImageSettings = settings.ImageSettings()
    video: settings.VideoSettings = settings.VideoSettings()
    cache: settings.CacheSettings = settings.CacheSettings()
    adapters: dict[str, str] = {}
    rank: Rank | None = None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish running requests, refuse new ones, finish writes to disk, then exit."""


class SetMemoryLimit(msgspec.Struct, frozen=True, tag="set_memory_limit"):
    """A new limit on device memory, which is shared with other models.

    Running requests finish; `MemoryStats` show when memory is under the limit.
    """

    limit_bytes: int


class ClearCaches(msgspec.Struct, frozen=True, tag="clear_caches"):
    """Drop all unused cache entries in memory, and give freed memory back."""


STACKS_SIGNAL = signal.SIGUSR1
"""The signal at which an engine writes its threads' stacks to standard error, even if they hang."""
LAST_WRITES_SECONDS = 5.0
"""Time limit for an engine's last writes to disk, once its requests have ended."""


Command = Start | Submit | Abort | Drain | SetMemoryLimit | ClearCaches
