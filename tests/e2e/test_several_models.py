"""Several models in one daemon: own answers, shared memory, independent crashes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.support.daemons import (
    SCRIPTED,
    Daemon,
    checkpoint,
    running_daemon,
    wait_until,
    with_settings,
)
from tests.support.images import one_shape, user
from vlm_server.models import EMBEDDED

pytestmark = pytest.mark.e2e

ROOM = 256 << 20


def settings(folder: Path, num_fitting: int) -> Path:
    """Settings of the embedded model twice and a random one, with memory for `num_fitting`."""
    nonsense = checkpoint("qwen2_5_vl")
    file = folder / "models.toml"
    limit = num_fitting * (ROOM + (40 << 20))
    tables = [f"[memory]\nmax_bytes = {limit}\n"]
    for name, path in (("one", EMBEDDED), ("two", EMBEDDED), ("nonsense", nonsense)):
        tables.append(f'[models.{name}]\npath = "{path}"\naliases = ["{name}-*"]\n')
    file.write_text("\n".join(tables))
    return file


@pytest.fixture(scope="module")
def roomy_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("roomy")
    keep_alive = ("--set", "server.stream_keepalive_seconds=0.3")
    with running_daemon(folder, "--config", str(settings(folder, 3)), *keep_alive) as running:
        yield running


@pytest.fixture(scope="module")
def narrow_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with memory for one model at a time."""
    folder = tmp_path_factory.mktemp("narrow")
    with running_daemon(folder, "--config", str(settings(folder, 1))) as running:
        yield running


def states(daemon: Daemon) -> dict[str, str]:
    return {model["name"]: model["state"] for model in daemon.status()["models"]}


def post(daemon: Daemon, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{daemon.url}{path}", json=body, timeout=60)


def footprint(daemon: Daemon) -> int:
    """The bytes of the daemon's processes, shared pages counted once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            rollup = (process / "smaps_rollup").read_text()
        except OSError:
            continue  # it has ended
        if _is_child(process, daemon.process.pid):
            total += int(rollup.partition("\nPss:")[2].split()[0]) << 10
    return total


def _is_child(process: Path, ancestor: int) -> bool:
    while process.name not in ("0", "1"):
        if process.name == str(ancestor):
            return True
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return False
        process = process.parent / parent
    return False


def ask(daemon: Daemon, model: str, **fields: Any) -> Any:
    image, shape = one_shape("circle", "red"), "circle"
    messages = [user(image, "What shape is this?")]
    fields = {"max_tokens": 8, "temperature": 0, **fields}
    answer = daemon.client().chat.completions.create(model=model, messages=messages, **fields)
    return answer, shape


@pytest.mark.whole
def test_models_give_their_own_answers(roomy_daemon: Daemon) -> None:
    assert set(states(roomy_daemon).values()) == {"unloaded"}
    for name in ("one", "nonsense-b"):
        answer, shape = ask(roomy_daemon, name)
        assert answer.model == name.partition("-")[0]
        assert (shape in answer.choices[0].message.content) == (name == "one")
    assert states(roomy_daemon) == {"one": "ready", "two": "unloaded", "nonsense": "ready"}
    answer, _ = ask(roomy_daemon, "default")
    assert answer.model == "one"
    with pytest.raises(openai.NotFoundError, match="`one`, `two`, `nonsense`"):
        ask(roomy_daemon, "three")
    limits = [model["limit_bytes"] for model in roomy_daemon.status()["models"]]
    assert sum(limits) <= 3 * (ROOM + (40 << 20))


@pytest.mark.whole
def test_engine_crash_affects_only_its_model(tmp_path: Path) -> None:
    """The engines are scripted, since only the front matters."""
    file = ("--config", str(settings(tmp_path, 3)))
    fast = with_settings("engine.openblas=off", "engine.min_restart_backoff_seconds=0.05")
    with running_daemon(tmp_path, *file, *fast, program=SCRIPTED) as daemon:
        for name in ("one", "two"):
            ask(daemon, name)
        running = daemon.client().chat.completions.create(
            model="one", messages=[user("Go on")], max_tokens=200, stream=True
        )
        next(running)
        daemon.kill_engine("two")
        assert [part.choices[0].finish_reason for part in running][-1] == "length"
        wait_until(lambda: states(daemon)["two"] == "ready", 60, daemon.log)
        answer, _ = ask(daemon, "two")
        assert answer.usage.completion_tokens == 8
        restarts = [
            daemon.get(f"/v1/status?model={name}")[1]["engine"]["restarts"]
            for name in ("one", "two")
        ]
        assert restarts == [0, 1]


@pytest.mark.alone  # pages that other daemons share count less
def test_unloading_returns_all_memory(roomy_daemon: Daemon) -> None:
    for name in ("one", "two"):
        assert post(roomy_daemon, "/v1/models/load", model=name).json()["state"] == "ready"
        assert post(roomy_daemon, "/v1/models/unload", model=name).json()["state"] == "unloaded"
    assert post(roomy_daemon, "/v1/models/unload", model="nonsense").status_code == 200
    before = footprint(roomy_daemon)
    ask(roomy_daemon, "one")
    assert footprint(roomy_daemon) > 1.2 * before
    post(roomy_daemon, "/v1/models/unload", model="one")
    assert footprint(roomy_daemon) == pytest.approx(before, rel=0.05)


@pytest.mark.whole
def test_ollamas_clients_load_and_unload(roomy_daemon: Daemon) -> None:
    client = ollama.Client(roomy_daemon.url)
    client.generate("two", keep_alive="10m")
    running = {model.model: model.expires_at for model in client.ps().models}
    expires_at = running["two:latest"]
    assert expires_at is not None
    assert 500 < expires_at.timestamp() - time.time() <= 600
    assert client.generate("two", keep_alive=0).done_reason == "unload"
    wait_until(lambda: states(roomy_daemon)["two"] == "unloaded", 10, roomy_daemon.log)
    client.generate("two", prompt="Hi", keep_alive=0, options={"num_predict": 2})
    wait_until(lambda: states(roomy_daemon)["two"] == "unloaded", 10, roomy_daemon.log)
    assert {model.model for model in client.list().models} == {
        "one:latest",
        "two:latest",
        "nonsense:latest",
    }


@pytest.mark.whole
def test_stream_comments_report_load_of_its_model(roomy_daemon: Daemon) -> None:
    post(roomy_daemon, "/v1/models/unload", model="one")
    body = {"model": "one", "stream": True, "max_tokens": 4}
    body["messages"] = [{"role": "user", "content": "Hi"}]
    answer = post(roomy_daemon, "/v1/chat/completions", **body)
    comments = [line for line in answer.text.splitlines() if line.startswith(": ")]
    assert any("weights" in line or "warming up" in line for line in comments)
    assert answer.text.rstrip().endswith("data: [DONE]")


@pytest.mark.whole
async def test_models_sharing_memory_by_turns_fail_no_request(narrow_daemon: Daemon) -> None:
    """Clients of three models, of which one fits: all get their own model's whole answers."""
    client = narrow_daemon.async_client()
    image, shape = one_shape("circle", "red"), "circle"
    messages: Any = [user(image, "What shape is this?")]

    async def whole(name: str) -> None:
        answer = await client.chat.completions.create(
            model=name, messages=messages, max_tokens=16, temperature=0
        )
        assert answer.model == name
        assert (shape in str(answer.choices[0].message.content)) == (name != "nonsense")

    async def streamed(name: str) -> None:
        stream = await client.chat.completions.create(
            model=name, messages=messages, max_tokens=16, temperature=0, stream=True
        )
        reasons = [part.choices[0].finish_reason async for part in stream if part.choices]
        assert [reason for reason in reasons if reason] in (["stop"], ["length"])

    async def agent(name: str) -> None:
        for _ in range(3):
            await whole(name)
            await streamed(name)

    await asyncio.gather(*(agent(name) for name in ("one", "two", "nonsense") for _ in range(2)))
    loaded = [name for name, state in states(narrow_daemon).items() if state != "unloaded"]
    assert len(loaded) == 1
    engine = narrow_daemon.get(f"/v1/status?model={loaded[0]}")[1]["engine"]
    assert engine["restarts"] == 0


@pytest.mark.whole
def test_model_next_to_pinned_one_is_refused_with_figures(tmp_path: Path) -> None:
    file = settings(tmp_path, 1)
    file.write_text(file.read_text().replace("[models.two]", "[models.two]\npinned = true"))
    with running_daemon(tmp_path, "--config", str(file)) as daemon:
        with pytest.raises(openai.InternalServerError, match="two keep") as caught:
            ask(daemon, "one")
        assert caught.value.status_code == 503
        answer, shape = ask(daemon, "two")
        assert shape in answer.choices[0].message.content
        assert post(daemon, "/v1/models/unload", model="two").status_code == 409
