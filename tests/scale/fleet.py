"""Real daemons that can be killed and restarted, behind a real gateway or proxy."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai

from scripts.scale_out import gateway_command, get
from tests.support.daemons import Daemon, free_port, running_daemon, wait_until

MODEL = "demo"
WORKER = "x-smg-routed-worker-id"
"""The header that tells who answered."""
_QUICK = ("--set", "engine.openblas=off", "--set", f"model.name={MODEL}")
_FEW = ("--set", "scheduler.max_num_seqs=8")
"""So that a crowd waits."""


class Daemons(dict[str, Daemon]):
    """The running daemons by their URLs."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        super().__init__()
        self._stacks: dict[str, ExitStack] = {}
        self._folder = folder
        self._checkpoint = checkpoint
        self._starts = count()

    def start(self, port: int = 0) -> str:
        """Start a daemon without waiting until it is ready; return its URL."""
        port = port or free_port()
        folder = self._folder / f"daemon-{next(self._starts)}"
        folder.mkdir()
        arguments = ("--model", str(self._checkpoint), "--port", str(port), *_QUICK, *_FEW)
        stack = ExitStack()
        daemon = stack.enter_context(running_daemon(folder, *arguments, wait=False))
        daemon.port = port
        self[daemon.url], self._stacks[daemon.url] = daemon, stack
        return daemon.url

    def stop(self, url: str) -> None:
        """Stop a daemon as a service manager does, and wait for its end."""
        self._stacks.pop(url).close()
        del self[url]

    def kill(self, url: str) -> None:
        """Kill a daemon's front; the engine ends by itself."""
        self[url].process.kill()
        self[url].process.wait()

    def restart(self, url: str) -> None:
        """Start another daemon at the same address, and wait until it is ready."""
        port = self[url].port
        self.stop(url)
        self.start(port)
        self[url].wait_ready()

    def close(self) -> None:
        for stack in self._stacks.values():
            stack.close()


class Fleet(ABC):
    """Daemons, and the gateway or proxy in front of them, on a port of its own."""

    def __init__(self, daemons: Daemons, folder: Path) -> None:
        self.daemons = daemons
        self.port = free_port()
        self.log = folder / "log"

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def url(self) -> str:
        """The URL of the gateway or proxy."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def worker_of(self, key: str, num_tokens: int = 1) -> str:
        """The URL of the daemon that answers a question with this key, in `num_tokens` tokens."""
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": num_tokens,
                "ignore_eos": True,
            },
            headers={"X-SMG-Routing-Key": key},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return answer.headers[WORKER]

    def key_for(self, worker: str) -> str:
        """A routing key that leads to this daemon."""
        return next(key for key in map(str, count()) if self.worker_of(key) == worker)

    def restart_daemon(self, url: str) -> None:
        """Restart a daemon, and wait until the gateway sends it requests."""
        self.daemons.restart(url)
        self.wait_for_workers()

    @abstractmethod
    def command(self) -> list[str]:
        """The command that starts the gateway."""

    @abstractmethod
    def is_before(self, number: int) -> bool:
        """Whether exactly `number` daemons get requests."""

    def wait_for_workers(self, number: int | None = None, seconds: float = 90.0) -> None:
        """Wait until `number` daemons (default: all that run) get requests."""
        wanted = len(self.daemons) if number is None else number
        wait_until(lambda: self.is_before(wanted), seconds, self.log)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the gateway within the block, once it accepts requests."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT)
        try:
            self.wait_for_workers()
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Gateway(Fleet):
    """The Shepherd Model Gateway as `scripts/scale_out` starts it."""

    def __init__(self, daemons: Daemons, folder: Path, program: str) -> None:
        super().__init__(daemons, folder)
        self._program = program

    def command(self) -> list[str]:
        return gateway_command(self._program, self.port, free_port(), list(self.daemons), MODEL)

    def is_before(self, number: int) -> bool:
        readiness = get(f"{self.url}/readiness")
        return readiness is not None and readiness["healthy_workers"] == number

    def add_worker(self, url: str) -> None:
        """Add a running daemon to the gateway."""
        body = json.dumps({"url": url}).encode()
        request = urllib.request.Request(
            f"{self.url}/workers", body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    def remove_worker(self, url: str) -> None:
        """Remove a daemon from the gateway."""
        workers = get(f"{self.url}/workers")["workers"]
        worker_id = next(worker["id"] for worker in workers if worker["url"] == url)
        httpx.delete(f"{self.url}/workers/{worker_id}", timeout=10).raise_for_status()
