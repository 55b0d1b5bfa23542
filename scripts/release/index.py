"""A package index of this machine's own, to which twine uploads what was built."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.release.artifacts import CheckFailed

START_SECONDS = 30.0


@contextlib.contextmanager
def serve(packages: list[Path], folder: Path) -> Iterator[str]:
    """The address of an index that has `packages`. Raises CheckFailed if it does not take them."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    anonymous = ("--authenticate", ".", "--passwords", ".", "--disable-fallback")
    address = ("--interface", "127.0.0.1", "--port", str(port))
    words = [sys.executable, "-m", "pypiserver", "run", *anonymous, *address, str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(port)
        _upload(packages, f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}/simple/"
    finally:
        process.terminate()
        process.wait(30)


def _wait(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise CheckFailed("the index does not start")


def _upload(packages: list[Path], url: str) -> None:
    account = ("--username", "anyone", "--password", "any", "--non-interactive")
    words = ["twine", "upload", "--disable-progress-bar", "--repository-url", url, *account]
    ended = subprocess.run(
        [sys.executable, "-m", *words, *map(str, packages)], capture_output=True, text=True
    )
    if ended.returncode:
        raise CheckFailed(f"twine can't upload:\n{ended.stdout}{ended.stderr}")
    print(f"uploaded to an index: {', '.join(path.name for path in packages)}")
