"""Starts several daemons and the Shepherd Model Gateway before them, on this machine.

All options that are not its own go to `vlm-server serve`. Unless they say otherwise, the daemons
share the half of the machine's memory that one alone would take. Docs: docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlm_server.platform import machine

ARGUMENTS = Path(__file__).parents[1] / "configs/scale-out/smg.args"
PORT = 30000
_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.2
_WANTS_KEY = (
    "the settings have API keys, which is not for this script: "
    "--set server.api_keys=[] --set server.api_key_file="
)
_STOP_SECONDS = 40.0
"""More than daemons and gateway give to requests that run."""


def find_gateway() -> str | None:
    """The gateway's program: that of this environment, else of PATH."""
    beside = Path(sys.executable).parent / "smg"
    return str(beside) if beside.exists() else shutil.which("smg")


def gateway_command(
    program: str, port: int, metrics_port: int, workers: Sequence[str], model: str
) -> list[str]:
    """What starts the gateway before the daemons at the URLs `workers`.

    It passes on requests for `model`, and those for `default` as such: other names are unknown to
    it.
    """
    addresses = ["--host", _HOST, "--port", str(port)]
    metrics = ["--prometheus-host", _HOST, "--prometheus-port", str(metrics_port)]
    named = ["--model-alias", f"default={model}", "--worker-urls", *workers]
    arguments = shlex.split(ARGUMENTS.read_text(encoding="utf-8"), comments=True)
    return [program, "launch", *arguments, *addresses, *metrics, *named]


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def get(url: str) -> Any:
    """The JSON at `url`; None if it does not answer, or with an error.

    Raises SystemExit if it wants an API key.
    """
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise SystemExit(_WANTS_KEY) from None
        return None
    except (OSError, ValueError):
        return None


class ScaleOut:
    """The processes that were started. `stop` is set when they are to end."""

    def __init__(self, folder: Path) -> None:
        self.stop = threading.Event()
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], **environment: str) -> None:
        """Start a process in a session of its own, so that a Ctrl-C reaches us alone.

        Daemons see their standard input close if this process is killed. Its log is in the folder.
        """
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )

    def pids(self) -> dict[str, int]:
        """Of the processes that were started, by their names."""
        return {name: process.pid for name, process in self._processes.items()}

    def wait_for(self, question: Callable[[], Any]) -> Any:
        """The first answer to `question` that says something; None if we are to stop before.

        Raises SystemExit if one of the processes ends first.
        """
        while not self.stop.is_set():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    log = (self._folder / f"{name}.log").read_text(errors="replace")
                    raise SystemExit(f"{name} has ended with {process.returncode}:\n{log[-2000:]}")
            if answer := question():
                return answer
            self.stop.wait(_LOOK_SECONDS)
        return None

    def watch(self) -> int:
        """Wait for the end; tell which daemons end before. Returns 1 if the gateway does."""
        running = dict(self._processes)
        while not self.stop.wait(_LOOK_SECONDS):
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                print(f"{name} has ended with {process.returncode}", file=sys.stderr, flush=True)
                if name == "gateway":
                    return 1
        return 0

    def end(self) -> None:
        """End the gateway, which takes no more requests then, and after it the daemons."""
        gateway = self._processes.pop("gateway", None)
        for processes in ([gateway] if gateway else [], list(self._processes.values())):
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", metavar="N", type=int, help="how many daemons")
    parser.add_argument("--port", type=int, default=PORT, help="the gateway's (%(default)s)")
    parser.add_argument(
        "--gpus", action="store_true", help="give each daemon a CUDA device of its own"
    )
    arguments, options = parser.parse_known_args()
    if arguments.number < 1:
        parser.error("N must be at least 1")
    program = find_gateway()
    if program is None:
        raise SystemExit("the gateway is not installed: scripts/setup scale")
    folder = Path(tempfile.mkdtemp(prefix="vlm-server-scale-out-"))
    started = ScaleOut(folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: started.stop.set())
    try:
        return run(started, program, arguments, options, folder)
    finally:
        started.end()


def run(
    started: ScaleOut,
    program: str,
    arguments: argparse.Namespace,
    options: list[str],
    folder: Path,
) -> int:
    """Start all, say so when they are ready, and wait. Returns the exit code."""
    print(f"logs are in {folder}", flush=True)
    urls = []
    share = machine.memory_bytes() // 2 // arguments.number
    limits = [] if arguments.gpus else ["--set", f"memory.max_bytes={share}"]
    for i in range(arguments.number):
        port = free_port()
        urls.append(f"http://{_HOST}:{port}")
        serve = [sys.executable, "-m", "vlm_server.cli", "serve", *limits, *options]
        environment = {"CUDA_VISIBLE_DEVICES": str(i)} if arguments.gpus else {}
        command = [*serve, "--host", _HOST, "--port", str(port), "--stop-at-eof"]
        started.start(f"daemon-{i}", command, **environment)
    models = started.wait_for(lambda: get(f"{urls[0]}/v1/models"))
    if models is None:
        return 0
    model = models["data"][0]["id"]
    started.start("gateway", gateway_command(program, arguments.port, free_port(), urls, model))
    front = f"http://{_HOST}:{arguments.port}"

    def is_ready() -> bool:
        told = get(f"{front}/readiness")
        return told is not None and told["healthy_workers"] == len(urls)

    if started.wait_for(is_ready):
        print(f"Ready: {front}/v1 (model {model}), before {', '.join(urls)}", flush=True)
        return started.watch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
