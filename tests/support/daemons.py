"""Daemons for tests: the program itself, on a free port, asked over HTTP.

Starting one takes seconds, so tests share them. Each of `SHARED_DAEMONS` is started once in a run,
and the tests of one kind run in one worker, whatever folders they lie in.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import openai

    from tests.scale.fleet import Daemons

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
LOOK_SECONDS = 0.02
PROGRAM, SCRIPTED = "vlm_server.cli", "tests.support.scripted_daemon"


@dataclass
class Daemon:
    """One running `vlm-server serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    api_key: str = "none"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        import openai  # takes a second, and most tests need none

        options = {"api_key": self.api_key, "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        import openai

        options = {"api_key": self.api_key, "max_retries": 0, "timeout": 60, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options)

    def get(self, path: str) -> tuple[int, Any]:
        """(status, decoded JSON) of a GET."""
        try:
            with self._open(path) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def status(self) -> dict[str, Any]:
        return self.get("/v1/status")[1]

    def num_in_flight(self) -> int:
        """The number of requests that the front holds."""
        return int(self.status()["requests"]["in_flight"])

    def num_abandoned(self) -> int:
        """Requests so far whose client left before its answer was complete."""
        counts = self.metrics().items()
        is_lost = re.compile(r'requests_total\{.*status="499"').match
        return sum(int(count) for name, count in counts if is_lost(name))

    def metrics(self) -> dict[str, float]:
        """All metrics by name and labels, without our prefix."""
        with self._open("/metrics") as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(maxsplit=1) for line in lines if line[0] != "#")
        return {name.removeprefix("vlm_server_"): float(value) for name, value in pairs}

    def engine_pid(self) -> int:
        return int(self.status()["engine"]["pid"])

    def kill_engine(self, model: str = "") -> None:
        """Kill the engine (of `model`), and wait until the service knows."""
        path = f"/v1/status?model={model}" if model else "/v1/status"
        pid = int(self.get(path)[1]["engine"]["pid"])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.get(path)[1]["engine"]["pid"] != pid, 30, self.log)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        wait_until(lambda: self._is_ready(), seconds, self.log)

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Wait until the engine tracks no request."""

        def is_idle() -> bool:
            return not any(self.status()["engine"]["stats"]["tracked_by"].values())

        wait_until(is_idle, seconds, self.log)

    def _open(self, path: str) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=10)
        return response

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.get("/health/ready")[0] == 200
        except OSError:
            return False


def wait_until(condition: Callable[[], Any], seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s; log:\n{log.read_text()}"
        time.sleep(LOOK_SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@cache
def checkpoint(family: str) -> Path:
    """The read-only folder of `family`'s tiny model."""
    from tests.tiny_models import build  # takes a second

    return build(family, Path(tempfile.mkdtemp(prefix="vlm-server-model-")) / "model")


def copied(family: str, folder: Path) -> Path:
    """`folder` with the files of `family`'s tiny model, for tests that change them."""
    return Path(shutil.copytree(checkpoint(family), folder))


def with_settings(*settings: str) -> list[str]:
    """The arguments that say `settings`, each like `server.port=1`."""
    return [word for setting in settings for word in ("--set", setting)]


_ROOM = with_settings("model.max_context_tokens=8192")
"""Long prompts and endless answers of tests fit; by default, the embedded model refuses them."""


@contextmanager
def running_daemon(
    folder: Path,
    *arguments: str,
    wait: bool = True,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    api_key: str = "none",
    program: str = PROGRAM,
) -> Iterator[Daemon]:
    """A daemon that has its own log and state in `folder`, and is gone afterwards.

    It is started in the working folder `cwd`; `environment` is added to ours. `api_key` is what we
    ask it with. With the `program` SCRIPTED its engines are scripted: see `scripted_daemon`.
    """
    log = folder / "daemon.log"
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", program, "serve", "--port", str(port), *_ROOM, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, "XDG_STATE_HOME": str(folder), **(environment or {})},
        )
    daemon = Daemon(process, port, log, api_key)
    try:
        if wait:
            daemon.wait_ready()
        yield daemon
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise


def is_alive(pid: int) -> bool:
    """Whether process `pid` runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended after the open
        if sys.platform == "linux":
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return state != "Z"


def command_of(pid: int) -> bytes:
    """The words of process `pid`'s command, each with a zero byte; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


# ---- kinds that are shared -------------------------------------------------------------------

ADMIN_KEY, USER_KEY, NARROW_KEY = "operator-key", "laptop-key", "one-request-at-a-time"
KEYS = f"""
[operator]
key = "{ADMIN_KEY}"
admin = true
[laptop]
key = "{USER_KEY}"
[narrow]
key = "{NARROW_KEY}"
max_requests = 1
"""


def write_keys(path: Path, text: str = KEYS) -> Path:
    """A file of keys, put in its place as an editor does: a new one instead of the old one."""
    draft = path.with_name("draft")
    draft.touch(mode=0o600)
    draft.write_text(text)
    return draft.replace(path)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon as a person starts it, with the embedded model."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a random model, whose answers run on until their limit."""
    model = ("--model", str(checkpoint("qwen3_vl")), *with_settings("model.name=model"))
    with running_daemon(tmp_path_factory.mktemp("tiny"), *model) as running:
        yield running


@pytest.fixture(scope="session")
def embedding_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a random model that makes vectors of texts and images."""
    model = ("--model", str(checkpoint("qwen3_vl_embedding")), *with_settings("model.name=model"))
    with running_daemon(tmp_path_factory.mktemp("embedding"), *model) as running:
        yield running


@pytest.fixture(scope="session")
def keyed_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The embedded model, asked with the operator's key; `KEYS` are there."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = write_keys(folder / "keys.toml")
    settings = with_settings(f"server.api_key_file={keys}")
    with running_daemon(folder, *settings, api_key=ADMIN_KEY) as running:
        yield running


@pytest.fixture(scope="session")
def keyed_tiny_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The same with a random model, whose answers run on until their limit."""
    folder = tmp_path_factory.mktemp("keyed-tiny")
    settings = (f"server.api_key_file={write_keys(folder / 'keys.toml')}", "model.name=model")
    model = ("--model", str(checkpoint("qwen3_vl")), *with_settings(*settings))
    with running_daemon(folder, *model, api_key=ADMIN_KEY) as running:
        yield running


@pytest.fixture(scope="session")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """Two daemons with a random model, to stand behind a gateway."""
    from tests.scale.fleet import Daemons

    started = Daemons(tmp_path_factory.mktemp("daemons"), checkpoint("qwen3_vl"))
    try:
        for url in (started.start(), started.start()):
            started[url].wait_ready()
        yield started
    finally:
        started.close()


SHARED_DAEMONS = (
    ("daemon", "daemon"),
    ("tiny_daemon", "tiny_daemon"),
    ("embedding_daemon", "embedding_daemon"),
    ("keyed_daemon", "keyed_daemon"),
    ("keyed_tiny_daemon", "keyed_tiny_daemon"),
    ("daemons", "daemons"),
)
"""The fixtures above, each with its kind: tests of one kind belong into one worker."""


def kind_of(item: pytest.Item) -> str | None:
    """The kind of shared daemon that a test asks, if it asks one; not those of its own module."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return None
    for name, kind in SHARED_DAEMONS:
        defined = info.name2fixturedefs.get(name, ())
        if defined and defined[-1].func.__module__ == __name__:
            return kind
    return None
