"""A real daemon for tests: the program itself, on a free port, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

START_SECONDS = 120.0


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
        options = {"api_key": self.api_key, "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
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

    def num_abandoned(self) -> int:
        """Requests so far whose client left before its answer was complete."""
        with self._open("/metrics") as response:
            lines = response.read().decode().splitlines()
        counts = (line for line in lines if line.startswith("vlm_server_requests_total{"))
        return sum(int(float(line.split()[-1])) for line in counts if 'status="499"' in line)

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
        """Until the engine says that nobody in it remembers a request."""

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


def wait_until(condition: Any, seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s; log:\n{log.read_text()}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_daemon(
    folder: Path,
    *arguments: str,
    wait: bool = True,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    api_key: str = "none",
) -> Iterator[Daemon]:
    """A daemon that has its own log in `folder`, and is gone afterwards.

    It is started in the working folder `cwd`; `environment` is added to ours. `api_key` is what we
    ask it with.
    """
    log = folder / "daemon.log"
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vlm_server.cli", "serve", "--port", str(port), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
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
