"""`ps` and `models list` show a running daemon's models and requests."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.daemons import SCRIPTED, Daemon, free_port, running_daemon, wait_until
from vlm_server.cli.main import main

pytestmark = pytest.mark.e2e
QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "accept wait"}]}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon with one unfinished request, beside a model in the hub's cache."""
    snapshot = tmp_path / f"hub/models--org--other/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with running_daemon(tmp_path, program=SCRIPTED) as daemon:
        client = http.client.HTTPConnection(f"127.0.0.1:{daemon.port}")
        headers = {"Content-Type": "application/json"}
        client.request("POST", "/v1/chat/completions", json.dumps(QUESTION), headers)
        wait_until(lambda: _models_of_requests(daemon) == ["demo"], 10, daemon.log)
        yield daemon
        client.close()


def _models_of_requests(daemon: Daemon) -> list[str | None]:
    """A request has no model until it is parsed."""
    return [request["model"] for request in daemon.status()["requests"]["list"]]


def test_ps_prints_models_and_requests(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", f"127.0.0.1:{daemon.port}"]) == 0
    models, requests = capsys.readouterr().out.split("\n\n")
    head, row = models.splitlines()
    assert head.split() == ["MODEL", "STATE", "MEMORY", "REQUESTS", "UNLOADED"]
    assert row.split()[:2] == ["demo", "ready"]
    assert row.split()[-2:] == ["1", "never"]
    request_id = daemon.status()["requests"]["list"][0]["id"]
    assert requests.splitlines()[1].split()[:2] == [request_id, "demo"]


def test_ps_json_lists_models_and_requests(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", "--json", "--url", f"127.0.0.1:{daemon.port}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["state"]) for model in printed["models"]] == [("demo", "ready")]
    assert [model["model"] for model in printed["requests"]] == ["demo"]


def test_models_list_shows_states_of_running_daemon(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{daemon.port}"
    assert main(["models", "list", "--json", "--url", address]) == 0
    states = {model["name"]: model["state"] for model in json.loads(capsys.readouterr().out)}
    assert states == {"org/other": None, "demo": "ready"}
    assert main(["models", "list", "--set", f"server.port={daemon.port}"]) == 0
    head, other, demo = capsys.readouterr().out.splitlines()
    assert "SERVED" in head
    assert "ready" not in other
    assert demo.split() == ["demo", "15", "MB", "qwen3_vl", "float16", "ready", "vlm-server"]


def test_ps_and_models_list_report_absent_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    port = free_port()
    address = f"127.0.0.1:{port}"
    for words in (["ps", "--url", address], ["models", "list", "--url", address]):
        assert main(words) == 1
        assert f"no daemon answers at http://{address}/v1" in capsys.readouterr().err
    assert main(["models", "list", "--set", f"server.port={port}"]) == 0
    assert "SERVED" not in capsys.readouterr().out
