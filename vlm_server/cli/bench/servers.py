"""Finds or starts the servers to ask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import httpx
import msgspec

from vlm_server.cli.bench.client import Target
from vlm_server.cli.client.daemon import api_url
from vlm_server.errors import ConfigError, VlmServerError
from vlm_server.platform.child import launch

_START_SECONDS = 900.0
_END_SECONDS = 30.0
_POLL_SECONDS = 0.2
_LOG_TAIL_LINES = 20


class ServerUnusable(VlmServerError):
    """A server can't be reached, or did not start. `details` is the end of its log, for --debug."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Kind(msgspec.Struct, frozen=True):
    """A server that this command can start: its arguments after `python -m`, and how to ask it.

    `{model}` and `{port}` are filled in.
    """

    command: tuple[str, ...]
    ready_path: str
    model: str


KINDS = {
    "ours": Kind(
        ("vlm_server.cli", "serve", "--model", "{model}", "--port", "{port}"),
        "/health/ready",
        "default",
    ),
    "mlx-vlm": Kind(
        ("mlx_vlm.server", "--model", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
        "/health",
        "{model}",
    ),
}


def parse_url(text: str) -> Target:
    """`NAME=http://host:port/v1[,model]`; without a model, `Target.model` is empty."""
    name, equals, rest = text.partition("=")
    typed, _, model = rest.partition(",")
    url = api_url(typed.strip())
    if not (name and equals and typed and url.startswith(("http://", "https://"))):
        raise ConfigError(f"expected NAME=http://host:port/v1[,model], not {text!r}")
    return Target(name.strip(), url, model.strip())


async def find_model(target: Target) -> Target:
    """`target` with the first model that its server lists, unless it names one itself."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            response = await http.get(f"{target.base_url}/models")
            models = response.raise_for_status().json()["data"]
            return (
                target if target.model else msgspec.structs.replace(target, model=models[0]["id"])
            )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        if target.model and isinstance(error, httpx.HTTPStatusError):
            return target
        raise ServerUnusable(
            f"{target.name}: {target.base_url}/models does not list a model: {_line(error)}"
        ) from None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


@contextlib.asynccontextmanager
async def started(
    name: str, kind: Kind, model: Path, environment: Mapping[str, str]
) -> AsyncIterator[Target]:
    """A ready server of `kind` on a free port; it is ended afterwards."""
    port = _free_port()
    fill = _fill(model, port)
    command = launch.command(*(word.format(**fill) for word in kind.command))
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile("w+") as log,
        _running(command, environment, log.fileno()) as process,
    ):
        ready = await _wait_ready(process, url + kind.ready_path)
        if not ready:
            log.seek(0)
            tail = "".join(log.readlines()[-_LOG_TAIL_LINES:])
            reason = tail.strip().rpartition("\n")[2].strip() or "it said nothing"
            raise ServerUnusable(f"{name} did not become ready: {reason}", tail)
        yield Target(name, f"{url}/v1", kind.model.format(**fill))


@contextlib.contextmanager
def _running(
    command: list[str], environment: Mapping[str, str], output: int
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        env={**launch.environment(with_preload=True), "HF_HUB_OFFLINE": "1", **environment},
        cwd=launch.FOLDER,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # a terminal's Ctrl-C is for the bench alone
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _wait_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether `url` answers 200 before the process ends or the time is up."""
    deadline = time.monotonic() + _START_SECONDS
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get(url)).status_code == 200:
                    return True
            await asyncio.sleep(_POLL_SECONDS)
    return False


def _fill(model: Path, port: int) -> dict[str, str]:
    return {"model": str(model.absolute()), "port": str(port)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
