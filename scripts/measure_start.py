"""Seconds from start to ready beside `mlx_vlm.load`, and the first answers after that.

Three processes per start: `mlx_vlm.load` alone; a daemon that gets, as soon as it is ready, a
picture, a second one of that size, and after some idle seconds a third; a daemon that gets a text,
and pictures while that is answered, whose longest silence counts. `--cold`: each with an empty
folder of compiled kernels. Prints medians with their spread, and the engine's own phases.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from vlm_server.cli.bench.material import DESCRIBE, Material, parse_size, user
from vlm_server.cli.bench.servers import BenchTarget, Client
from vlm_server.platform.child import launch
from vlm_server.platform.private_folder import PrivateFolder
from vlm_server.settings import EngineSettings
from vlm_server.supervisor.engine_process.start import for_models

_LOAD = (
    "import sys, time; started = time.monotonic(); import mlx_vlm; "
    "imported = time.monotonic(); mlx_vlm.load(sys.argv[1]); "
    "print(imported - started, time.monotonic() - imported)"
)
_ANSWER_TOKENS = 8
_STREAM_TOKENS = 300
_TIMEOUT_SECONDS = 900.0
_POLL_SECONDS = 0.02
_PHASE = re.compile(r"(warming up on [a-z ]+:|loaded in|warmed up in|compiled \w+ in) ([0-9.]+) s")

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure_start", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--size", default="1092x812", help="of the pictures")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds before a later picture")
    parser.add_argument("--cold", action="store_true", help="no compiled kernels at any start")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    wanted = parser.parse_args()
    found: dict[str, list[float]] = {}
    for number in range(wanted.starts):
        for measured in _measure(wanted, number):
            for name, value in measured.items():
                found.setdefault(name, []).append(value)
    for name, values in found.items():
        spread = f"[{min(values):.3f}-{max(values):.3f}] {len(values)}"
        print(f"{name:56} {statistics.median(values):9.3f} {spread}")


def _measure(wanted: argparse.Namespace, number: int) -> Iterator[Figures]:
    material = Material(parse_size(wanted.size), os.getpid(), "start", number)

    async def pictures(client: Client) -> Figures:
        first, second = [await _ttft(client, material) for _ in range(2)]
        await asyncio.sleep(wanted.idle)
        later = [await _ttft(client, material) for _ in range(3)]
        return {
            "TTFT of the first picture, s": first,
            "TTFT of the second picture, s": second,
            "TTFT of a picture after idle seconds, s": statistics.median(later),
            "the first picture's TTFT by that of a later one": first / statistics.median(later),
        }

    async def stream(client: Client) -> Figures:
        text = asyncio.create_task(client.ask(material.story(), _STREAM_TOKENS))
        await asyncio.sleep(0.5)
        for _ in range(2):
            await _ttft(client, material)
        answer = await text
        assert answer.ttft is not None, answer.error
        return {
            "TTFT of the first text, s": answer.ttft,
            "longest silence of that text beside pictures, s": max(answer.gaps, default=0.0),
        }

    for ask in (None, pictures, stream):
        with tempfile.TemporaryDirectory() as empty:
            folders = ("XDG_CACHE_HOME", "TMPDIR") if wanted.cold else ()
            environment = dict.fromkeys(folders, empty)
            yield _load(wanted, environment) if ask is None else _serve(wanted, environment, ask)


async def _ttft(client: Client, material: Material) -> float:
    answer = await client.ask([user(DESCRIBE, material.image())], _ANSWER_TOKENS)
    assert answer.ttft is not None, answer.error
    return answer.ttft


def _load(wanted: argparse.Namespace, environment: Mapping[str, str]) -> Figures:
    """A process that imports mlx-vlm and loads the model, in an engine's environment."""
    for_engines = for_models(PrivateFolder(), EngineSettings())
    command = [sys.executable, "-c", _LOAD, str(wanted.model.absolute())]
    env = {**launch.model_environment(), **for_engines, **environment}
    begun = time.monotonic()
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.monotonic() - begun
    imported, loaded = map(float, done.stdout.split()[-2:])
    return {
        "process with mlx_vlm.load, s": seconds,
        "  import of mlx_vlm, s": imported,
        "  mlx_vlm.load, s": loaded,
    }


def _serve(
    wanted: argparse.Namespace,
    environment: Mapping[str, str],
    ask: Callable[[Client], Awaitable[Figures]],
) -> Figures:
    settings = [word for setting in ("log.level=debug", *wanted.set) for word in ("--set", setting)]
    with (
        tempfile.TemporaryFile("w+") as log,
        _daemon(wanted, settings, environment, log.fileno()) as url,
    ):
        begun, ready = url[1], _wait_ready(url[0])

        async def run() -> Figures:
            async with Client(
                BenchTarget("ours", f"{url[0]}/v1", "default"), _TIMEOUT_SECONDS
            ) as client:
                return await ask(client)

        figures = asyncio.run(run())
        log.seek(0)
        phases = {f"  {name} (s)": float(seconds) for name, seconds in _PHASE.findall(log.read())}
        return {"daemon ready, s": ready - begun, **phases, **figures}


@contextmanager
def _daemon(
    wanted: argparse.Namespace, settings: list[str], environment: Mapping[str, str], log: int
) -> Iterator[tuple[str, float]]:
    """The address of a new daemon, and the time of its start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ("serve", "--model", str(wanted.model.absolute()), "--port", port, *settings)
    begun = time.monotonic()
    process = subprocess.Popen(
        launch.command("vlm_server.cli", *words),
        env={**launch.environment(with_preload=True), "HF_HUB_OFFLINE": "1", **environment},
        cwd=launch.FOLDER,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        yield f"http://127.0.0.1:{port}", begun
    finally:
        process.terminate()
        process.wait()


def _wait_ready(url: str) -> float:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200:
                return time.monotonic()
        except httpx.TransportError:
            pass
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("the daemon is not ready")


if __name__ == "__main__":
    main()
