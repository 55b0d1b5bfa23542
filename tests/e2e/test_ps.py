"""`ps` and `models list` show a running daemon's models and requests."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.daemons import SCRIPTED, running_daemon, wait_until
from vlm_server.cli.main import main

pytestmark = pytest.mark.e2e
QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "accept wait"}]}


def test_ps_shows_models_and_requests_of_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / f"hub/models--org--other/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with running_daemon(tmp_path, program=SCRIPTED) as daemon:
        address = f"127.0.0.1:{daemon.port}"
        asking = http.client.HTTPConnection(address)
        headers = {"Content-Type": "application/json"}
        asking.request("POST", "/v1/chat/completions", json.dumps(QUESTION), headers)
        wait_until(lambda: daemon.status()["requests"]["list"], 10, daemon.log)

        assert main(["ps", "--url", address]) == 0
        models, requests = capsys.readouterr().out.split("\n\n")
        head, row = models.splitlines()
        assert head.split() == ["MODEL", "STATE", "MEMORY", "REQUESTS", "UNLOADED"]
        assert row.split()[:2] == ["demo", "ready"]
        assert row.split()[-2:] == ["1", "never"]
        assert requests.splitlines()[1].split()[:2] == [
            daemon.status()["requests"]["list"][0]["id"],
            "demo",
        ]

        assert main(["ps", "--json", "--url", address]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert [(model["name"], model["state"]) for model in shown["models"]] == [("demo", "ready")]
        assert [model["model"] for model in shown["requests"]] == ["demo"]

        assert main(["models", "list", "--json", "--url", address]) == 0
        states = {model["name"]: model["state"] for model in json.loads(capsys.readouterr().out)}
        assert states == {"org/other": None, "demo": "ready"}
        assert main(["models", "list", "--set", f"server.port={daemon.port}"]) == 0
        head, other, demo = capsys.readouterr().out.splitlines()
        assert "SERVED" in head
        assert "ready" not in other
        assert demo.split() == ["demo", "?", "?", "?", "ready", "the", "daemon"]
        asking.close()
    for words in (["ps", "--url", address], ["models", "list", "--url", address]):
        assert main(words) == 1
        assert f"no answer from http://{address}/v1" in capsys.readouterr().err
    assert main(["models", "list", "--set", f"server.port={daemon.port}"]) == 0
    assert "SERVED" not in capsys.readouterr().out
