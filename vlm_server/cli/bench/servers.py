"""The servers of a bench, found or started, and their client.

An answer is parsed when complete, so that parsing does not distort the times of other answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import msgspec

from vlm_server.cli.bench.material import ChatMessage
from vlm_server.cli.client.answer import TimedAnswer, failed_answer, read_answer
from vlm_server.cli.client.chat import ChatClient, routing_key
from vlm_server.cli.client.daemon import api_url, authorization, why_silent
from vlm_server.errors import ConfigError, VlmServerError
from vlm_server.platform.child import launch

_START_SECONDS = 900.0
_END_SECONDS = 30.0
_POLL_SECONDS = 0.2
_LOG_TAIL_LINES = 20
_STATUS_SECONDS = 10.0
_STATUS_DELAY_SECONDS = 0.2
"""Longest delay of the engine's figures; an idle engine reports immediately."""


class ServerUnusable(VlmServerError):
    """A server can't be reached, or did not start. `details` is the end of its log, for --debug."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class ServerKind(msgspec.Struct, frozen=True):
    """A kind of server that can be started with `python -m`; `{model}`, `{port}` are filled in."""

    command: tuple[str, ...]
    ready_path: str
    model: str


KINDS = {
    "ours": ServerKind(
        ("vlm_server.cli", "serve", "--model", "{model}", "--port", "{port}"),
        "/health/ready",
        "default",
    ),
    "mlx-vlm": ServerKind(
        ("mlx_vlm.server", "--model", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
        "/health",
        "{model}",
    ),
}


def server_kind(name: str, *, with_drafts: bool, settings: Sequence[str] = ()) -> ServerKind:
    """The kind `name`; `ours` with `settings` and, without drafts, `num_speculative_tokens = 0`."""
    kind = KINDS[name]
    if name != "ours":
        return kind
    drafts = () if with_drafts else ("scheduler.num_speculative_tokens=0",)
    words = [setting.replace("{", "{{").replace("}", "}}") for setting in (*drafts, *settings)]
    options = chain.from_iterable(("--set", word) for word in words)
    return msgspec.structs.replace(kind, command=(*kind.command, *options))


class BenchTarget(msgspec.Struct, frozen=True):
    """A server to ask: `base_url` ends in `/v1`; `model` is the name in requests."""

    name: str
    base_url: str
    model: str
    api_key: str | None = None


def parse_url(text: str, api_key: str | None = None) -> BenchTarget:
    """`NAME=http://host:port/v1[,model]`; without a model, `BenchTarget.model` is empty."""
    name, equals, rest = text.partition("=")
    typed, _, model = rest.partition(",")
    url = api_url(typed.strip())
    if not (name and equals and typed and url.startswith(("http://", "https://"))):
        raise ConfigError(f"expected NAME=http://host:port/v1[,model], not {text!r}")
    return BenchTarget(name.strip(), url, model.strip(), api_key)


async def find_model(target: BenchTarget) -> BenchTarget:
    """`target` with the first model that its server lists, unless it names one itself."""
    try:
        headers = authorization(target.api_key)
        async with httpx.AsyncClient(trust_env=False, timeout=30, headers=headers) as http:
            response = await http.get(f"{target.base_url}/models")
            models = response.raise_for_status().json()["data"]
            name = target.model or models[0]["id"]
            return msgspec.structs.replace(target, model=name)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        if target.model and isinstance(error, httpx.HTTPStatusError):
            return target
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        text = f"{target.base_url}/models does not list a model: {reason}"
        if isinstance(error, httpx.TransportError):
            text = why_silent(target.base_url, error)
        raise ServerUnusable(f"{target.name}: {text}") from None


@contextlib.asynccontextmanager
async def start_server(
    name: str, kind: ServerKind, model: Path, environment: Mapping[str, str]
) -> AsyncIterator[BenchTarget]:
    """A ready server of `kind` on a free port, ended with the block. `model` is absolute."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fill = {"model": str(model), "port": str(port)}
    command = launch.command(*(word.format(**fill) for word in kind.command))
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile("w+") as log,
        _run_server(command, environment, log.fileno()) as process,
    ):
        if not await _wait_ready(process, url + kind.ready_path):
            log.seek(0)
            tail = "".join(log.readlines()[-_LOG_TAIL_LINES:])
            reason = tail.strip().rpartition("\n")[2].strip() or "it said nothing"
            raise ServerUnusable(f"{name} did not become ready: {reason}", tail)
        yield BenchTarget(name, f"{url}/v1", kind.model.format(**fill))


@contextlib.contextmanager
def _run_server(
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


class Client(ChatClient):
    """The client of one target. Every request gives a `TimedAnswer`, kept until `take_answers`."""

    def __init__(self, target: BenchTarget, timeout_seconds: float) -> None:
        super().__init__(target.base_url, api_key=target.api_key, timeout=None, trust_env=False)
        self.target = target
        self._timeout_seconds = timeout_seconds
        self._answers: list[TimedAnswer] = []

    async def ask(self, messages: list[ChatMessage], max_tokens: int, key: str = "") -> TimedAnswer:
        """Stream one greedy answer of at most `max_tokens`; failures are answers too.

        `key` is the routing key, if its messages were since removed.
        """
        body = msgspec.json.encode(
            {
                "model": self.target.model,
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        answer = await self._send(body, key or routing_key(messages))
        self._answers.append(answer)
        return answer

    async def num_clears(self) -> int | None:
        """The number of times that an idle target returned freed device memory; None if unknown."""
        await asyncio.sleep(_STATUS_DELAY_SECONDS)
        try:
            url = f"{self.target.base_url}/status"
            response = await self._http.get(url, timeout=_STATUS_SECONDS)
            told: Any = response.raise_for_status().json()
            decisions: dict[str, int] = told["engine"]["stats"]["memory"]["decisions"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None  # another kind of server
        return sum(times for kind, times in decisions.items() if kind.startswith("clear_"))

    def take_answers(self) -> list[TimedAnswer]:
        """Answers since the last call, in the order of their ends."""
        answers, self._answers = self._answers, []
        return answers

    async def _send(self, body: bytes, key: str) -> TimedAnswer:
        clock = time.perf_counter
        sent_at = clock()
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self.post(body, len(body), key) as response,
            ):
                received = [piece async for piece in response.received()]
        except TimeoutError:
            return failed_answer(
                f"no end within {self._timeout_seconds:g} seconds", clock() - sent_at
            )
        except httpx.HTTPError as error:
            return failed_answer(f"{type(error).__name__}: {error}", clock() - sent_at)
        seconds = clock() - sent_at
        if response.status != 200:
            text = b"".join(data for _, data in received).decode(errors="replace")
            return failed_answer(f"HTTP {response.status}: {text}", seconds)
        return read_answer(received, seconds)
