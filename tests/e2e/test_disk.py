"""The disk cache continues a conversation after the daemon stops or the engine dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Daemon, is_alive, running_daemon, wait_until
from tests.support.images import one_shape, user
from vlm_server.cache.disk.files import temporary_name

pytestmark = pytest.mark.e2e

FIRST = [
    {"role": "system", "content": "Answer in one word."},
    user(one_shape("star", "red"), "What shape is this?"),
]
NEXT = "What colour is it?"


def on_disk(folder: Path) -> tuple[str, ...]:
    return "--set", "cache.max_disk_bytes=100000000", "--set", f"cache.disk_folder={folder}"


def ask(daemon: Daemon, messages: list[Any]) -> tuple[str, int]:
    """The greedy answer, and the number of cached prompt tokens."""
    answer = daemon.client().chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=30
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def ask_in_stream(daemon: Daemon, messages: list[Any]) -> Iterator[Any]:
    """The chunks of the greedy answer; the last has the usage."""
    answer = daemon.client().chat.completions.create(
        model="default",
        messages=messages,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    return iter(answer)


def stop(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGTERM)


def disk(daemon: Daemon) -> dict[str, Any]:
    (reading,) = (c for c in daemon.status()["engine"]["stats"]["caches"] if c["name"] == "disk")
    return reading


def wait_written(daemon: Daemon, folder: Path, count: int) -> None:
    """Wait until `count` files are complete."""

    def is_written() -> bool:
        names = [path.name for path in folder.rglob("*.safetensors")]
        return len(names) >= count and not any(name.startswith("tmp-") for name in names)

    wait_until(is_written, 30, daemon.log)


@pytest.fixture(scope="module")
def expected_answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The answers of a daemon without a disk cache."""
    nothing = [f"cache.max_{name}_bytes=0" for name in ("prefix", "encoder", "pixel")]
    options = [part for setting in nothing for part in ("--set", setting)]
    with running_daemon(tmp_path_factory.mktemp("plain"), *options) as daemon:
        first, known = ask(daemon, FIRST)
        second, known_of_second = ask(daemon, second_turn(first))
        assert known == known_of_second == 0
        assert not any(c["name"] == "disk" for c in daemon.status()["engine"]["stats"]["caches"])
    return first, second


def second_turn(first: str) -> list[Any]:
    return [*FIRST, {"role": "assistant", "content": first}, user(NEXT)]


@pytest.mark.whole
def test_restarted_daemon_finds_conversation_on_disk(
    expected_answers: tuple[str, str], tmp_path: Path
) -> None:
    first, second = expected_answers
    options = on_disk(tmp_path / "cache")
    with running_daemon(tmp_path, *options) as daemon:
        assert ask(daemon, FIRST) == (first, 0)
        wait_written(daemon, tmp_path / "cache", 3)  # an image, its prompt, the answer
    with running_daemon(tmp_path, *options) as daemon:
        answer, known = ask(daemon, second_turn(first))
        assert answer == second
        assert known > 50, "the image is in it"
        wait_until(lambda: disk(daemon)["hits"] > 0, 5, daemon.log)


@pytest.mark.whole
def test_damaged_disk_cache_files_are_not_used(
    expected_answers: tuple[str, str], tmp_path: Path
) -> None:
    first, second = expected_answers
    options = on_disk(tmp_path / "cache")
    with running_daemon(tmp_path, *options) as daemon:
        ask(daemon, FIRST)
        wait_written(daemon, tmp_path / "cache", 3)
    with running_daemon(tmp_path, *options) as daemon:
        for path in (tmp_path / "cache").rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
        assert ask(daemon, second_turn(first)) == (second, 0)
        wait_until(lambda: disk(daemon)["damaged"] > 0, 5, daemon.log)


@pytest.mark.whole
@pytest.mark.parametrize("moment", ["just idle", "still answering"])
def test_stop_waits_for_pending_disk_writes(
    expected_answers: tuple[str, str], tmp_path: Path, moment: str
) -> None:
    first, second = expected_answers
    options = on_disk(tmp_path / "cache")
    with running_daemon(tmp_path, *options) as daemon:
        stream = ask_in_stream(daemon, FIRST)
        chunks = [next(stream)] if moment == "still answering" else list(stream)
        stop(daemon)
        chunks += list(stream)
        assert daemon.process.wait(15) == 0
    (usage,) = (chunk.usage for chunk in chunks if chunk.usage)
    with running_daemon(tmp_path, *options) as daemon:
        assert ask(daemon, second_turn(first)) == (second, usage.total_tokens)


@pytest.mark.whole
def test_stop_does_not_wait_for_hung_disk(tmp_path: Path) -> None:
    options = on_disk(tmp_path / "cache")
    with running_daemon(tmp_path, *options) as daemon:
        ask(daemon, FIRST)
        wait_written(daemon, tmp_path / "cache", 3)
    with running_daemon(tmp_path, *options) as daemon:
        for path in (tmp_path / "cache").rglob("*.safetensors"):
            key = path.name.rpartition("-")[0]
            path.write_bytes(b"")  # so that it is computed and written again
            name = temporary_name(key, daemon.engine_pid())
            os.mkfifo(path.with_name(name))  # nobody reads: opening it waits
        ask(daemon, FIRST)
        engine = daemon.engine_pid()
        stop(daemon)
        assert daemon.process.wait(15) == 0
        assert not is_alive(engine)


@pytest.mark.whole
def test_restarted_engine_finds_conversation_on_disk(
    expected_answers: tuple[str, str], tmp_path: Path
) -> None:
    first, second = expected_answers
    with running_daemon(tmp_path, *on_disk(tmp_path / "cache")) as daemon:
        for number in range(3):
            assert ask(daemon, FIRST)[0] == first
            daemon.kill_engine()
            daemon.wait_ready()
            assert not list((tmp_path / "cache").rglob("tmp-*")), number
        assert ask(daemon, FIRST)[0] == first
        wait_written(daemon, tmp_path / "cache", 3)
        daemon.kill_engine()
        daemon.wait_ready()
        answer, known = ask(daemon, second_turn(first))
        assert (answer, known > 50, disk(daemon)["damaged"]) == (second, True, 0)
