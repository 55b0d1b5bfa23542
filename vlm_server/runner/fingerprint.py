"""Hashes that identify a checkpoint: a quick digest, and a fingerprint of all content for the disk.

Weights are hashed once: hashes are kept on disk, with what shows whether a file was changed since.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import vlm_server
from vlm_server.hub.layout import visible_files

logger = logging.getLogger(__name__)

_READERS = ("mlx", "mlx-vlm", "transformers", "tokenizers", "pillow", "av")
"""Packages whose versions may differ in the pixels, tokens or features of the same bytes."""
_SOURCES = frozenset({".py", ".cu", ".cuh"})
_WEIGHTS = ("*.safetensors",)
_SMALL = ("*.json", "*.jinja", "*.model")
_ENDS_BYTES = 1 << 20
"""Bytes hashed at a file's beginning, where its header is, and at its end."""
_SETTLED_NS = 3_000_000_000
"""Age below which a file may be changed again within one tick of its clock."""
_MAX_KEPT = 1000


Stat = tuple[int, ...]


@dataclass(slots=True)
class Checkpoint:
    """The files of a model, as they were before loading read them.

    `dtype`: as in the settings. `template`: the file of `model.chat_template`, if any. `drafter`:
    the folder of its drafter's weights, whose KV is stored with its own."""

    folder: Path
    dtype: str
    template: str = ""
    drafter: Path | None = None
    _stats: list[Stat] = field(init=False)

    def __post_init__(self) -> None:
        self._stats = self._read_stats()

    def digest(self) -> str:
        """SHA-256 in hex over the configuration, and of each file of weights its name, size, first
        and last MiB."""
        digest = self._start_digest()
        for path in _files(self.folder, _WEIGHTS):
            digest.update(f"{path.name} {path.stat().st_size} {_ends(path)}\0".encode())
        return digest.hexdigest()

    def fingerprint(self, hashes: KeptHashes) -> str:
        """SHA-256 in hex over weights, configuration, processor and template, and the readers.

        The folder's name and location do not count. Reads weights that are not in `hashes`: a
        second per 1.5 GB. Raises OSError if a file was changed since this object was made: which
        weights were loaded is unknown then.
        """
        digest = self._start_digest()
        _add_readers(digest)
        for path in self._weights():
            digest.update(f"{path.name} {hashes.sha256(path)}\0".encode())
        if self._read_stats() != self._stats:
            raise OSError(errno.ESTALE, "the checkpoint was changed after its model was loaded")
        return digest.hexdigest()

    def _start_digest(self) -> hashlib._Hash:
        digest = hashlib.sha256(self.dtype.encode())
        for path in self._small_files():
            digest.update(f"{path.name} {_sha256(path)}\0".encode())
        return digest

    def _weights(self) -> list[Path]:
        """Those of the model, then those of its drafter, which may be in the same files."""
        folders = [self.folder, *([] if self.drafter is None else [self.drafter])]
        return [path for folder in folders for path in _files(folder, _WEIGHTS)]

    def _small_files(self) -> list[Path]:
        template = [Path(self.template)] if self.template else []
        return _files(self.folder, _SMALL) + template

    def _read_stats(self) -> list[Stat]:
        """Sizes and times of all readable files; loading reports the others."""
        found = []
        for path in self._small_files() + self._weights():
            with suppress(OSError):
                found.append(_stat(path))
        return found


class KeptHashes:
    """SHA-256 of large files, kept in `file` from one start to the next.

    A file is known by its place in the file system, its size, its times of change to the
    nanosecond, and its first and last MiB. Every write into the file changes `st_ctime`, which
    programs can't set. Files changed within three seconds before they were read are not kept.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._digests = self._read()

    def sha256(self, path: Path) -> str:
        """The hash of the file's whole content; reads the file if the hash is not kept."""
        started_at = time.time_ns()
        identity = _identity(path)
        if (digest := self._digests.pop(identity, None)) is None:
            digest = _sha256(path)
            stat = path.stat()
            is_settled = started_at - max(stat.st_mtime_ns, stat.st_ctime_ns) > _SETTLED_NS
            if not is_settled or _identity(path) != identity:
                return digest
        self._digests[identity] = digest  # the newest last
        self._write()
        return digest

    def _read(self) -> dict[str, str]:
        with suppress(OSError, ValueError):
            content = json.loads(self._file.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return {str(key): str(value) for key, value in content.items()}
        return {}

    def _write(self) -> None:
        entries = dict(list(self._digests.items())[-_MAX_KEPT:])
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
                json.dump(entries, file)
            temporary.replace(self._file)
        except OSError as error:
            logger.warning("the next start reads all weights: %s", error)


def state_fingerprint(checkpoint: str, device: str) -> str:
    """SHA-256 in hex over a checkpoint's fingerprint, the device, and this program's code."""
    digest = hashlib.sha256(f"{checkpoint}\0{device}\0{platform.machine()}\0".encode())
    _add_code(digest)
    return digest.hexdigest()


def program_digest() -> str:
    """SHA-256 in hex over this program's code, and the versions of the readers."""
    digest = hashlib.sha256()
    _add_readers(digest)
    _add_code(digest)
    return digest.hexdigest()


def _add_readers(digest: hashlib._Hash) -> None:
    for package in _READERS:
        digest.update(f"{package} {version(package)}\0".encode())


def sources(package: Path) -> list[Path]:
    """This program's modules and kernels, in order. Other installed files do not count."""
    return sorted(path for path in package.rglob("*") if path.suffix in _SOURCES)


def _add_code(digest: hashlib._Hash) -> None:
    package = Path(vlm_server.__path__[0])
    for path in sources(package):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package)} {content}\0".encode())


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in visible_files(folder, pattern))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(path: Path) -> str:
    return hashlib.sha256(f"{_stat(path)} {_ends(path)}".encode()).hexdigest()


def _stat(path: Path) -> Stat:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_ENDS_BYTES))
        file.seek(max(_ENDS_BYTES, path.stat().st_size - _ENDS_BYTES))
        digest.update(file.read(_ENDS_BYTES))
    return digest.hexdigest()
