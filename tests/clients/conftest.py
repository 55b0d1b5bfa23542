"""For all client libraries: one real daemon that needs a key, and scripted engines.

The daemon runs the embedded model, so its answers are true. Scripted engines behind the real front
do what that model cannot: parallel calls, reasoning, odd arguments."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.daemons import NARROW_KEY, Daemon, wait_until
from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import ScriptedEngine

ENDLESS = {"max_tokens": 7000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(autouse=True)
def _collects_between_tests() -> Iterator[None]:
    """A stream that a library has left open is closed when it is collected. Where that happens
    while httpcore holds the lock of its connections, it waits for that lock for ever.
    """
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="session")
def daemon(keyed_daemon: Daemon) -> Daemon:
    """The embedded model; its key has all rights."""
    return keyed_daemon


@pytest.fixture
def crowded(daemon: Daemon) -> Iterator[str]:
    """A key whose only allowed request is running throughout the test."""
    client = daemon.client(api_key=NARROW_KEY)
    messages = [{"role": "user", "content": "Count from 1 to 100."}]
    with client.chat.completions.create(
        model="demo", messages=messages, stream=True, **ENDLESS
    ) as answer:
        next(answer)
        yield NARROW_KEY


class Abandons:
    """A context manager that waits at its end until the daemon has aborted an answer."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.before = 0

    def __enter__(self) -> None:
        self.before = self.daemon.num_abandoned()

    def __exit__(self, *raised: object) -> None:
        def is_noticed() -> bool:
            return self.daemon.num_abandoned() > self.before

        wait_until(is_noticed, 10, self.daemon.log)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.__exit__)


@pytest.fixture
def abandons(daemon: Daemon) -> Abandons:
    return Abandons(daemon)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def scripted(engine: ScriptedEngine) -> AsyncIterator[str]:
    """The address of the real front with `engine`; it needs no key."""
    async with listening(engine) as port:
        yield f"http://127.0.0.1:{port}"
