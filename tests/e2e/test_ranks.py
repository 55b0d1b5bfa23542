"""A model split over two processes answers, fails and recovers like one in a single process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.child_pids import children_of
from tests.support.daemons import (
    Daemon,
    checkpoint,
    command_of,
    is_alive,
    running_daemon,
    wait_until,
)
from tests.support.images import image_part, noise, user
from tests.support.ports import free_ports
from vlm_server.platform.child import launch
from vlm_server.settings import Log
from vlm_server.supervisor.engine_process.ranks import Host, Hostfile, ranks_of

pytestmark = pytest.mark.whole

WAITING_SECONDS = 4.0
"""After which a rank that was started waits for others."""
FAMILIES = ("qwen3_vl_moe", "qwen3_vl")
"""One that mlx-vlm splits itself, and one that is split here."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def two_hosts(folder: Path) -> list[str]:
    """Arguments of a daemon with two ranks, both on this machine."""
    hosts = folder / "hosts.json"
    host = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
    hosts.write_text(json.dumps({"backend": "ring", "hosts": [host, host]}))
    return ["--hostfile", str(hosts), "--set", f"distributed.port={free_ports(3)}"]


def follower_of(daemon: Daemon) -> int:
    """The process of the second rank, started by the daemon."""
    (follower,) = (
        child
        for child in children_of(daemon.process.pid)
        if b"vlm_server.engine.follower" in command_of(child)
    )
    return follower


@pytest.fixture(scope="module", params=FAMILIES)
def one_and_two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Daemon, Daemon]]:
    """A daemon with a whole model, and one with two ranks of it."""
    folder = tmp_path_factory.mktemp("ranks")
    model = ["--model", str(checkpoint(request.param))]
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    with (
        running_daemon(folder / "one", *model) as one,
        running_daemon(folder / "two", *model, *two_hosts(folder)) as two,
    ):
        yield one, two


def answer_texts(daemon: Daemon, messages: list[Any], **options: Any) -> list[str | None]:
    options = {"temperature": 0, "max_tokens": 24, **options}
    answer = daemon.client().chat.completions.create(model="default", messages=messages, **options)
    return [choice.message.content for choice in answer.choices]


WORK: dict[str, Callable[[Daemon], Any]] = {
    "text": lambda daemon: answer_texts(daemon, [{"role": "user", "content": "Name four colours"}]),
    "image": lambda daemon: answer_texts(daemon, [user(noise(1, (84, 84)), "What is this?")]),
    "long": lambda daemon: answer_texts(daemon, [{"role": "user", "content": "again and " * 300}]),
    "choices": lambda daemon: answer_texts(
        daemon, [user(noise(2, (60, 90)), "Guess")], n=3, temperature=1.0, seed=7
    ),
    "penalties": lambda daemon: answer_texts(
        daemon,
        [{"role": "user", "content": "Count to ten"}],
        temperature=0.8,
        top_p=0.9,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"5": -4},
    ),
    "schema": lambda daemon: answer_texts(
        daemon,
        [{"role": "user", "content": "A name and a count"}],
        max_tokens=80,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "made", "strict": True, "schema": SCHEMA},
        },
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_two_ranks_answer_as_one_process(
    one_and_two_ranks: tuple[Daemon, Daemon], name: str
) -> None:
    one, two = one_and_two_ranks
    assert WORK[name](two) == WORK[name](one)


def test_two_ranks_decide_as_one_process(one_and_two_ranks: tuple[Daemon, Daemon]) -> None:
    options = [f"option {i}" for i in range(90)]
    questions = {name: {"instructions": name, "criteria": options} for name in ("Which?", "And?")}
    picture = image_part(noise(5, (84, 60)))["image_url"]["url"]
    logprobs = []
    for daemon in one_and_two_ranks:
        answer = httpx.post(
            f"{daemon.url}/v1/decisions",
            json={"images": [picture], "questions": questions},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        logprobs.append([each["logprobs"] for each in answer.json()["answers"].values()])
    for one, two in zip(*logprobs, strict=True):
        assert one == pytest.approx(two, rel=1e-4)


def test_two_ranks_verify_same_drafts(one_and_two_ranks: tuple[Daemon, Daemon]) -> None:
    """A long greedy answer repeats itself, so that it is drafted from its own text."""
    messages = [{"role": "user", "content": "Say the same again and again, the same again"}]
    one, two = one_and_two_ranks
    options = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    assert answer_texts(two, messages, **options) == answer_texts(one, messages, **options)
    assert two.status()["engine"]["stats"]["spec_drafts"] > 0


def test_batched_requests_on_two_ranks_answer_as_alone(
    one_and_two_ranks: tuple[Daemon, Daemon],
) -> None:
    one, two = one_and_two_ranks
    expected = {name: work(one) for name, work in WORK.items()}
    with ThreadPoolExecutor(len(WORK)) as threads:
        got = {name: threads.submit(work, two) for name, work in WORK.items()}
        assert {name: future.result() for name, future in got.items()} == expected
    two.wait_idle()


def test_two_ranks_continue_conversation_from_prefix_cache(
    one_and_two_ranks: tuple[Daemon, Daemon],
) -> None:
    """The shared beginning is stored, split where two conversations diverge, and continued."""
    answers_by_port: dict[int, list[str | None]] = {}
    for daemon in one_and_two_ranks:
        answers: list[str | None] = []
        for ending in ("Which is the largest?", "Which is the smallest of them all?"):
            messages: list[Any] = [user(noise(5, (84, 84)), "Look at these. " * 20 + ending)]
            for _ in range(3):
                answer = answer_texts(daemon, messages)
                messages += [{"role": "assistant", "content": answer[0] or "-"}]
                messages += [user(noise(6, (60, 60)), "And now?")]
                answers += answer
        answers_by_port[daemon.port] = answers
    one, two = one_and_two_ranks
    assert answers_by_port[two.port] == answers_by_port[one.port]
    caches = two.status()["engine"]["stats"]["caches"]
    assert next(cache for cache in caches if cache["name"] == "prefix")["hits"] >= 4


@pytest.mark.whole
def test_two_ranks_hold_quantized_kv_as_one_process(tmp_path: Path) -> None:
    packing = ["--set", "cache.kv_bits=8", "--set", "cache.quantize_running=true"]
    options = ["--model", str(checkpoint("qwen3_vl")), *packing]
    answers = []
    for name, more in (("one", []), ("two", two_hosts(tmp_path))):
        folder = tmp_path / name
        folder.mkdir()
        with running_daemon(folder, *options, *more) as daemon:
            answers.append([WORK[work](daemon) for work in ("long", "image", "long")])
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][2], "a hit"


def test_disconnected_client_leaves_two_ranks_working(
    one_and_two_ranks: tuple[Daemon, Daemon],
) -> None:
    one, two = one_and_two_ranks
    stream = two.client().chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Go on"}],
        max_tokens=4000,
        temperature=0,
        stream=True,
    )
    for _ in range(5):
        next(stream)
    stream.close()
    two.wait_idle()
    assert WORK["text"](two) == WORK["text"](one)


# ---- ends ------------------------------------------------------------------------------------


@pytest.fixture
def daemon_to_kill(tmp_path: Path) -> Iterator[Daemon]:
    model = checkpoint("qwen3_vl")
    options = [
        "--set",
        "engine.min_restart_backoff_seconds=0.1",
        "--set",
        "server.drain_timeout_seconds=2",
    ]
    with running_daemon(tmp_path, "--model", str(model), *two_hosts(tmp_path), *options) as daemon:
        yield daemon
        follower = follower_of(daemon)
    assert not is_alive(follower)


def stream_of(daemon: Daemon) -> Any:
    return daemon.client().chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Go on"}],
        max_tokens=6000,
        temperature=0,
        stream=True,
    )


@pytest.mark.parametrize("victim", ["follower", "first"])
def test_dead_rank_ends_streams_and_all_ranks_restart(
    daemon_to_kill: Daemon, tiny_daemon: Daemon, victim: str
) -> None:
    expected = WORK["image"](tiny_daemon)
    assert WORK["image"](daemon_to_kill) == expected
    stream = stream_of(daemon_to_kill)
    for _ in range(5):
        next(stream)
    first = daemon_to_kill.engine_pid()
    follower = follower_of(daemon_to_kill)
    os.kill(follower if victim == "follower" else first, signal.SIGKILL)
    with pytest.raises(Exception, match="engine"):
        for _ in stream:
            pass
    wait_until(
        lambda: daemon_to_kill.status()["engine"]["pid"] not in (None, first),
        30,
        daemon_to_kill.log,
    )
    daemon_to_kill.wait_ready()
    assert not is_alive(follower)
    assert WORK["image"](daemon_to_kill) == expected


def test_hung_rank_is_killed_and_replaced(tmp_path: Path) -> None:
    model = checkpoint("qwen3_vl_moe")
    options = ["--set", "engine.silence_timeout_seconds=3"]
    with running_daemon(tmp_path, "--model", str(model), *two_hosts(tmp_path), *options) as daemon:
        first = daemon.engine_pid()
        follower = follower_of(daemon)
        os.kill(follower, signal.SIGSTOP)
        with pytest.raises(Exception, match="engine"):
            answer_texts(daemon, [{"role": "user", "content": "Hello"}])
        wait_until(lambda: daemon.status()["engine"]["pid"] not in (None, first), 30, daemon.log)
        daemon.wait_ready()
        assert answer_texts(daemon, [{"role": "user", "content": "Hello"}])
        assert not is_alive(follower)


# ---- ranks that wait for others ---------------------------------------------------------------


def test_waiting_rank_ends_when_its_input_closes(tmp_path: Path) -> None:
    hosts = (Host("127.0.0.1", ("127.0.0.1",)),) * 3
    rank = ranks_of(Hostfile(hosts, "ring"), free_ports(4), Log())[1]
    follower = subprocess.Popen(
        launch.command("vlm_server.engine.follower"),
        env=launch.environment() | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
    )
    try:
        assert follower.stdin is not None
        follower.stdin.write(msgspec.json.encode(rank) + b"\n")
        follower.stdin.flush()
        time.sleep(WAITING_SECONDS)
        follower.stdin.close()
        assert follower.wait(5) == 0
    finally:
        follower.kill()
    assert not list(tmp_path.iterdir())


def test_engine_waiting_for_ranks_ends_with_its_daemon(tmp_path: Path) -> None:
    """The daemon is killed, while its `ssh` never connects."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec cat >/dev/null\n")
    ssh.chmod(0o755)
    hosts = tmp_path / "hosts.json"
    ours = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
    hosts.write_text(json.dumps([ours, ours | {"ssh": "elsewhere"}]))
    options = ["--hostfile", str(hosts), "--set", f"distributed.port={free_ports(3)}"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with running_daemon(tmp_path, *options, wait=False, environment=path) as daemon:
        wait_until(lambda: engine_of(daemon) is not None, 30, daemon.log)
        engine = engine_of(daemon)
        assert engine is not None
        time.sleep(WAITING_SECONDS)
        daemon.process.kill()
        daemon.process.wait()
        try:
            wait_until(lambda: not is_alive(engine), 5, daemon.log)
        finally:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)


def engine_of(daemon: Daemon) -> int | None:
    """The engine of a starting daemon, once there is one."""
    try:
        pid: int | None = daemon.status()["engine"]["pid"]
    except OSError:
        return None
    return pid


# ---- starts that fail ------------------------------------------------------------------------


def test_unreachable_rank_ends_start_with_its_status(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    ours = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
    hosts.write_text(json.dumps([ours, ours | {"ssh": "nobody.invalid"}]))
    with running_daemon(tmp_path, "--hostfile", str(hosts), wait=False) as daemon:
        assert daemon.process.wait(60) != 0
        assert "rank 1 has ended with status 255" in daemon.log.read_text()


def test_unsplittable_family_ends_start_with_reason(tmp_path: Path) -> None:
    model = checkpoint("kimi_vl")
    with running_daemon(
        tmp_path, "--model", str(model), *two_hosts(tmp_path), wait=False
    ) as daemon:
        assert daemon.process.wait(60) != 0
        assert "can't be split" in daemon.log.read_text()
