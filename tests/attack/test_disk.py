"""Failing disks: answers continue, and sound cache files stay."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.test_disk import ask, disk, on_disk, wait_written
from tests.support.daemons import Daemon, checkpoint, running_daemon, wait_until
from tests.support.images import noise, user

NO_BLAS = ("--set", "engine.openblas=off")
WARNINGS = ("the disk of the cache is full", "a cache file can't be written")


def question(number: int) -> list[object]:
    """A new image and prompt for each number."""
    return [user(noise(number, (64, 64)), f"Question {number}: what is this?")]


def num_warnings(daemon: Daemon) -> int:
    return sum(daemon.log.read_text().count(words) for words in WARNINGS)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.safetensors") if not path.name.startswith("tmp-")]


def wait_quiet(folder: Path) -> None:
    """Wait until nothing has been written for a second."""
    names, since = set[str](), time.monotonic()
    while time.monotonic() - since < 1:
        found = {path.name for path in folder.rglob("*")}
        if found != names:
            names, since = found, time.monotonic()
        time.sleep(0.05)


@contextmanager
def limited(daemon: Daemon, kind: int, limit: int) -> Iterator[None]:
    """Set a resource limit of the engine."""
    pid = daemon.engine_pid()
    before = resource.prlimit(pid, kind, (limit, resource.prlimit(pid, kind)[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


@pytest.fixture(scope="module")
def model() -> str:
    return str(checkpoint("qwen3_vl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "cache"


@pytest.fixture(scope="module")
def daemon(model: str, folder: Path) -> Iterator[Daemon]:
    with running_daemon(folder.parent, "--model", model, *NO_BLAS, *on_disk(folder)) as running:
        yield running


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of a running process")


@pytest.mark.whole
def test_engine_without_descriptors_keeps_disk_cache_files(daemon: Daemon, folder: Path) -> None:
    answer, _ = ask(daemon, question(0))
    wait_written(daemon, folder, 3)
    daemon.kill_engine()
    daemon.wait_ready()  # so that only the disk has it
    before = files_in(folder)
    with limited(daemon, resource.RLIMIT_NOFILE, 3):  # no number below that is free
        assert ask(daemon, question(0)) == (answer, 0)
    assert set(before) <= set(files_in(folder))
    wait_until(lambda: disk(daemon)["misses"] > 0, 10, daemon.log)
    assert disk(daemon)["damaged"] == 0
    daemon.kill_engine()
    daemon.wait_ready()
    assert ask(daemon, question(0))[1] > 20, "the files are as good as before"


def test_full_disk_evicts_entries_and_answers_continue(model: str, tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "mount", 128 << 10) as mount,
        running_daemon(tmp_path, "--model", model, *NO_BLAS, *on_disk(mount)) as daemon,
    ):
        count = 0
        while not disk(daemon)["evictions"]:
            assert ask(daemon, question(count))[0]
            count += 1
            assert count < 40
        assert num_warnings(daemon) == 1
        wait_written(daemon, mount, 1)
        assert disk(daemon)["damaged"] == 0


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of `size_bytes`; skips the test if this process can't mount one."""
    path.mkdir()
    options = f"size={size_bytes},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
