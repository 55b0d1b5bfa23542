"""The process that downloads a checkpoint: `python -m ...hub.download_process REPO REVISION`.

Reports to its parent (`messages`), and ends when its standard input does. The revision is pinned to
a commit before anything else is read. The snapshot appears in the cache once all files are there; a
killed download leaves blobs, whole or partial, and none of their bytes is downloaded twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.hf_api import RepoFile

from vlm_server.hub import layout
from vlm_server.hub.download_file import (
    HubFile,
    blob_path,
    download_file,
    held_bytes,
    snapshot_path,
)
from vlm_server.hub.failures import Unusable, download_refused
from vlm_server.hub.find import hub_cache
from vlm_server.hub.messages import GO, Done, DownloadPlan, Message, Progress
from vlm_server.hub.names import HubName
from vlm_server.sizes import file_size

_NUM_THREADS = 4
_TICK_SECONDS = 0.5
_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_JSON_BYTES = 8 << 20
_SPARE_BYTES = 10**9
"""Left free on the disk."""


class Download:
    """The download of one revision of a repository into the hub's cache."""

    def __init__(self, name: HubName, send: Callable[[Message], None]) -> None:
        self._name = name
        self._send = send
        self._cache = hub_cache()
        self._repository = self._cache / name.cache_folder
        self._commit = ""
        self._files: list[HubFile] = []
        self._under_way: set[str] = set()

    def run(self, may_go: threading.Event) -> Path:
        """The snapshot's folder. Waits for `may_go` between the plan and the weights.

        Raises what `failures.download_refused` explains.
        """
        parameters = self._pin()
        with self._lock(), self._report_progress():
            config = self._choose_files()
            self._check_disk()
            self._send(self._plan(config, parameters))
            may_go.wait()
            self._download_files()
            return self._publish()

    def _pin(self) -> dict[str, int]:
        """Resolve the revision to a commit; returns how many weights of which type it has."""
        info = HfApi().model_info(self._name.repo, revision=self._name.revision or None)
        is_commit = info.sha is not None and _HEX.fullmatch(info.sha)
        if not is_commit or (self._name.is_pinned and info.sha != self._name.revision):
            raise Unusable(f"the hub answers for {self._name} with commit {info.sha}")
        self._commit = str(info.sha)
        return dict(info.safetensors.parameters) if info.safetensors else {}

    def _choose_files(self) -> dict[str, Any]:
        """Choose the files to download; returns the configuration, which is read on the way."""
        tree = HfApi().list_repo_tree(self._name.repo, revision=self._commit)
        files_by_path = {file.path: file for file in tree if isinstance(file, RepoFile)}
        if fault := layout.fault_of_names(files_by_path) or layout.missing_files_of(files_by_path):
            raise Unusable(f"{self._name} {fault}")
        chosen_files = {
            path: _hub_file(file) for path, file in files_by_path.items() if layout.is_read(path)
        }
        index = self._object(chosen_files[layout.INDEX]) if layout.INDEX in chosen_files else {}
        if shards := layout.shards(index) & set(chosen_files):
            extra = {path for path in chosen_files if path.endswith(layout.WEIGHTS)} - shards
            chosen_files = {path: file for path, file in chosen_files.items() if path not in extra}
        config = self._object(chosen_files[layout.CONFIG])
        # The largest first: else a thread would be alone with it in the end.
        self._files = sorted(chosen_files.values(), key=lambda file: -file.size)
        return config

    def _object(self, file: HubFile) -> dict[str, Any]:
        if file.size > _MAX_JSON_BYTES:
            raise Unusable(f"{file.path} of {self._name} has {file_size(file.size)}")
        try:
            content = json.loads(self._download(file).read_bytes())
        except ValueError:
            raise Unusable(f"{file.path} of {self._name} is no JSON") from None
        return content if isinstance(content, dict) else {}

    def _plan(self, config: dict[str, Any], parameters: dict[str, int]) -> DownloadPlan:
        weights = [file.size for file in self._files if file.path.endswith(layout.WEIGHTS)]
        return DownloadPlan(
            repo=self._name.repo,
            commit=self._commit,
            config=config,
            files=tuple(file.path for file in self._files),
            parameters=parameters,
            weight_bytes=sum(weights),
            total_bytes=self._total_bytes,
            missing_bytes=self._total_bytes - self._held_bytes,
        )

    def _check_disk(self) -> None:
        missing_bytes = self._total_bytes - self._held_bytes
        free_bytes = shutil.disk_usage(self._repository).free
        if missing_bytes and missing_bytes + _SPARE_BYTES > free_bytes:
            raise Unusable(
                f"the disk of {self._cache} has {file_size(free_bytes)} free, and {self._name} "
                f"needs {file_size(missing_bytes)} more, beside {file_size(_SPARE_BYTES)} that are "
                "left free: make room (`vlm-server models list`, `rm`), or set HF_HUB_CACHE to "
                "another disk"
            )

    def _download_files(self) -> None:
        """Raises the first error, once no thread works any more."""
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            futures = [threads.submit(self._download, file) for file in self._files]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _download(self, file: HubFile) -> Path:
        self._under_way.add(file.path)
        path = download_file(self._repository, self._name.repo, self._commit, file)
        self._under_way.discard(file.path)
        return path

    def _publish(self) -> Path:
        """Make the snapshot of the blobs: its configuration last, so that it is whole or absent.

        Where the disk has no symbolic links the snapshot has copies, and needs no blobs.
        """
        for file in sorted(self._files, key=lambda file: file.path == layout.CONFIG):
            path = snapshot_path(self._repository, self._commit, file)
            blob = blob_path(self._repository, file)
            assert path.exists() or blob.exists()
            hf_hub_download(
                self._name.repo, file.path, revision=self._commit, cache_dir=self._cache
            )
            if not path.is_symlink():
                blob.unlink(missing_ok=True)
        if not self._name.is_pinned:
            _replace(self._repository / "refs" / (self._name.revision or "main"), self._commit)
        return self._repository / "snapshots" / self._commit

    @property
    def _total_bytes(self) -> int:
        return sum(file.size for file in self._files)

    @property
    def _held_bytes(self) -> int:
        return sum(held_bytes(self._repository, self._commit, file) for file in self._files)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Held by one process at a time; the next ones find the files that it downloaded."""
        folder = self._cache / ".locks" / self._name.cache_folder
        folder.mkdir(parents=True, exist_ok=True)
        self._repository.mkdir(parents=True, exist_ok=True)
        with (folder / "vlm-server.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._send(Progress("", 0, 0, is_waiting=True))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: hashes tell if two have met
                pass
            yield

    @contextlib.contextmanager
    def _report_progress(self) -> Iterator[None]:
        """Progress messages to the parent during the `with` block."""
        is_over = threading.Event()

        def report() -> None:
            while not is_over.wait(_TICK_SECONDS):
                paths = (file.path for file in self._files if file.path in self._under_way)
                if path := next(paths, None):
                    self._send(Progress(path, self._held_bytes, self._total_bytes))

        thread = threading.Thread(target=report, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _hub_file(file: RepoFile) -> HubFile:
    kind, name = ("sha256", file.lfs.sha256) if file.lfs is not None else ("git", file.blob_id)
    if not _HEX.fullmatch(name):  # it will be the name of a file
        raise Unusable(f"the hub gives {name!r} as the hash of {file.path}")
    return HubFile(file.path, file.size, f"{kind}:{name}")


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _send(message: Message) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")


def _obey(may_go: threading.Event) -> None:
    """Wait for the parent's `GO`; end the process when the parent ends."""
    text = b""
    while data := os.read(sys.stdin.fileno(), 4096):  # holds no lock when the program ends
        text += data
        if GO in text:
            may_go.set()
    os._exit(1)


def main() -> None:
    may_go = threading.Event()
    threading.Thread(target=_obey, args=(may_go,), name="parent", daemon=True).start()
    name = HubName(sys.argv[1], sys.argv[2])
    try:
        _send(Done(str(Download(name, _send).run(may_go))))
    except Exception as error:  # noqa: BLE001  the hub's library raises many kinds
        _send(download_refused(error, name))


if __name__ == "__main__":
    main()
