"""`bench` refuses bad arguments, finds models and servers, and always writes its results."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.unit.cli.scripted_server import ScriptedServer, echo, listening
from vlm_server.cli.bench import command, run
from vlm_server.cli.bench.day import FIXED_WORK
from vlm_server.cli.bench.day import NAME as DAY
from vlm_server.cli.bench.report import BenchPlan
from vlm_server.cli.bench.scenarios import SCENARIOS
from vlm_server.cli.bench.servers import (
    KINDS,
    BenchTarget,
    ServerKind,
    ServerUnusable,
    find_model,
    parse_url,
    server_kind,
    start_server,
)
from vlm_server.cli.main import build_parser
from vlm_server.errors import ConfigError


def parse(*arguments: str) -> argparse.Namespace:
    words = ["bench", *arguments]
    options: argparse.Namespace = build_parser(words).parse_args(words)
    return options


def test_bench_choices_match_server_kinds_and_scenarios() -> None:
    assert tuple(KINDS) == command.KINDS
    assert (*SCENARIOS, "day") == command.SCENARIOS
    assert (*SCENARIOS, DAY) == command.SCENARIOS


def test_bench_finds_checkpoint_by_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / f"models--org--it/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert run.checkpoint("org/it") == snapshot
    assert run.checkpoint(str(snapshot)) == snapshot
    with pytest.raises(ConfigError, match="vlm-server pull org/other"):
        run.checkpoint("org/other")
    with pytest.raises(ConfigError, match="did you mean org/it"):
        run.checkpoint("orgit")


def test_bench_plan_counts_warm_ups_and_scenario_runs() -> None:
    """One warm-up per server, and one run per scenario, round and server."""
    plan = BenchPlan(("a", "b"), 3, (1, 1), 0, 1.0)
    assert plan.num_runs(2) == 2 + 2 * 3 * 2


URL = "--url=a=http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--start", "ours"), "--model"),
        (("--start", "ours", "--model", "/nowhere"), "--model"),
        ((URL, "--scenarios", "repeat,nap"), "'nap'"),
        ((URL, "--rounds", "0"), "--rounds"),
        ((URL, "--minutes", "0"), "--minutes"),
        ((URL, "--json", "/nowhere/all.json"), "--json"),
        ((URL, "--size", "big"), "WIDTHxHEIGHT"),
        (("--url", "127.0.0.1:8000"), "NAME="),
        ((URL, URL), "same name"),
        ((URL, "--url=b=http://127.0.0.1:9/v1"), "same server twice"),
    ],
)
def test_bench_refuses_invalid_arguments(arguments: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        run.run(parse(*arguments))


def test_bench_reports_unreachable_server():
    with pytest.raises(ServerUnusable, match="a: no daemon answers at http"):
        run.run(parse(URL))


def test_bench_url_parses_name_address_and_model():
    assert parse_url("a=http://h:1/v1/,org/model") == BenchTarget("a", "http://h:1/v1", "org/model")
    assert parse_url("a=http://h:1/v1") == BenchTarget("a", "http://h:1/v1", "")
    assert parse_url("a=h:1,org/model") == BenchTarget("a", "http://h:1/v1", "org/model")


async def test_bench_queries_model_name_only_if_not_given():
    async with listening(ScriptedServer()) as url:
        assert (await find_model(BenchTarget("a", url, ""))).model == "scripted"
        assert (await find_model(BenchTarget("a", url, "mine"))).model == "mine"


async def test_bench_prints_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "all.json"
    async with listening(ScriptedServer()) as one, listening(ScriptedServer()) as two:
        urls = [f"--url=one={one}", f"--url=two={two}"]
        options = ["--scenarios=question,right", "--rounds=1", "--size=40x20", f"--json={file}"]
        status = await run.bench(parse(*urls, *options))
    printed = capsys.readouterr()
    assert status == 0
    assert "question: one picture, eight different questions\n  Good: " in printed.out
    assert "two: 20 requests, 0 failed" in printed.out
    assert "question (one picture, eight different questions): one took" in printed.err
    assert set(json.loads(file.read_text())["servers"]) == {"one", "two"}


async def test_bench_measures_running_daemon_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its address and key are those of the settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    app = ScriptedServer()
    async with listening(app) as url:
        port = url.removesuffix("/v1").rpartition(":")[2]
        (tmp_path / "vlm-server").mkdir()
        (tmp_path / "vlm-server/config.toml").write_text(
            f'[server]\nport = {port}\napi_keys = ["key-number-one", "key-number-two"]\n'
        )
        options = ["--scenarios=question", "--rounds=1", "--size=40x20", "--json=-"]
        assert await run.bench(parse(*options)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["servers"] == {"daemon": {"url": url, "model": "scripted"}}
    assert set(app.authorizations) == {"Bearer key-number-one"}


async def test_bench_day_writes_samples(tmp_path: Path):
    file = tmp_path / "day.json"
    async with listening(ScriptedServer()) as url:
        options = ["--scenarios=day", "--minutes=0.001", "--rounds=1", "--size=40x20"]
        status = await run.bench(parse(f"--url=it={url}", *options, f"--json={file}"))
    assert status == 0
    *_, day = json.loads(file.read_text())["runs"]
    assert {sample["kind"] for sample in day["samples"]} > {"burst", FIXED_WORK}


async def test_bench_writes_results_when_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "all.json"

    def stop_soon(request: dict[str, Any]) -> list[tuple[float, bytes]]:
        if len(app.requests) > 11:
            task.cancel()
        return echo(request)

    app = ScriptedServer(stop_soon)
    async with listening(app) as url:
        options = ["--scenarios=question,repeat", "--size=40x20", f"--json={file}"]
        task = asyncio.create_task(run.bench(parse(f"--url=one={url}", *options)))
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "from the second question on" in capsys.readouterr().out
    assert [run["scenario"] for run in json.loads(file.read_text())["runs"]] == [
        "warm-up",
        "question",
    ]


async def test_bench_exits_with_failure_if_server_never_answered():
    broken = ScriptedServer(lambda _: [(0.0, b"no")], status=500)
    async with listening(broken) as url:
        arguments = parse(f"--url=one={url}", "--scenarios=question", "--rounds=1", "--size=40x20")
        assert await run.bench(arguments) == 1


async def test_bench_reports_output_of_server_that_exits_at_start(tmp_path: Path):
    broken = ServerKind(("platform", "{model}"), "/health", "default")
    with pytest.raises(ServerUnusable, match="it did not become ready") as caught:
        async with start_server("it", broken, tmp_path, {}):
            pass
    assert "\n" not in str(caught.value)
    assert caught.value.details.count("\n") >= 1


def test_drafts_are_turned_off_for_our_servers_alone():
    for name in KINDS:
        assert server_kind(name, with_drafts=True) == KINDS[name]
    assert "scheduler.num_speculative_tokens=0" in server_kind("ours", with_drafts=False).command
    assert server_kind("mlx-vlm", with_drafts=False) == KINDS["mlx-vlm"]


def test_settings_are_those_of_our_servers_alone():
    given = ["memory.max_bytes=4GiB", "urls.https_hosts=[{}]"]
    kind = server_kind("ours", with_drafts=True, settings=given)
    options = [word.format(model="m", port=1) for word in kind.command]
    assert options[-4:] == ["--set", given[0], "--set", given[1]]
    assert server_kind("mlx-vlm", with_drafts=True, settings=given) == KINDS["mlx-vlm"]


async def test_bench_starts_and_stops_server(tmp_path: Path):
    kind = ServerKind(("http.server", "{port}", "--directory", "{model}"), "/", "{model}")
    async with start_server("it", kind, tmp_path, {"SOME": "thing"}) as target:
        assert target.name == "it"
        assert target.model == str(tmp_path)
        port = int(target.base_url.removesuffix("/v1").rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
    with pytest.raises(OSError):  # noqa: PT011  refused, in whichever words
        await asyncio.open_connection("127.0.0.1", port)
