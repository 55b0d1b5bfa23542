"""`serve --model ORG/NAME`: download from a hub, progress, the answer, and early refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.fixtures import demo_files, hub, model
from tests.hub.server import Hub, add
from tests.support.daemons import Daemon, free_port, running_daemon, wait_until
from tests.support.images import one_shape, user
from tests.tiny_models import cached
from vlm_server.models import EMBEDDED

__all__ = ["hub"]

NAME = "org/shapes"
pytestmark = pytest.mark.e2e


@pytest.fixture
def daemon(hub: Hub, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that has just begun a slow download."""
    add(hub, NAME, demo_files())
    hub.seconds_per_mib = 0.3
    with running_daemon(tmp_path, "--model", NAME, wait=False) as daemon:
        wait_until(lambda: is_up(daemon), 30, daemon.log)
        yield daemon


def is_up(daemon: Daemon) -> bool:
    try:
        return bool(daemon.get("/health/live")[0] == 200)
    except OSError:
        return False


def readiness(daemon: Daemon) -> tuple[int, dict[str, Any]]:
    return daemon.get("/health/ready")


@pytest.mark.whole
def test_front_reports_download_progress_and_then_answers(
    daemon: Daemon, hub: Hub, tmp_path: Path
) -> None:
    status, body = readiness(daemon)
    assert (status, body["status"]) == (503, "downloading")
    wait_until(lambda: readiness(daemon)[1]["progress"].get("bytes", 0) > 0, 30, daemon.log)
    progress = readiness(daemon)[1]["progress"]
    assert progress["stage"] == "downloading"
    assert progress["file"] == "model.safetensors"
    assert 0 < progress["bytes"] < progress["total_bytes"]
    assert 0 < progress["fraction"] < 1
    assert daemon.get("/v1/models")[1]["data"][0]["id"] == NAME
    hub.seconds_per_mib = 0.0
    daemon.wait_ready()
    assert readiness(daemon)[1] == {"status": "ready", "progress": None}
    answer = daemon.client().chat.completions.create(
        model=NAME,
        messages=[user(one_shape("circle", "red"), "What shape is this?")],
        max_tokens=20,
    )
    assert "circle" in (answer.choices[0].message.content or "")
    assert answer.model == NAME
    log = daemon.log.read_text()
    assert "downloading model.safetensors: " in log
    assert log.count("downloading") < 40
    hub.requests.clear()
    with running_daemon(tmp_path, "--model", NAME) as again:
        assert again.get("/v1/models")[1]["data"][0]["id"] == NAME
    assert not hub.requests


def test_stopped_daemon_ends_its_download(daemon: Daemon, hub: Hub) -> None:
    wait_until(lambda: hub.sent_bytes["model.safetensors"], 30, daemon.log)
    started = time.monotonic()
    daemon.process.terminate()
    assert daemon.process.wait(15) == 0
    assert time.monotonic() - started < 10
    sent = hub.sent_bytes["model.safetensors"]
    time.sleep(1.0)
    assert hub.sent_bytes["model.safetensors"] <= sent + (1 << 20)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vlm_server.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_unknown_hub_model_ends_serve_with_reason(hub: Hub) -> None:
    done = run("serve", "--port", "0", "--model", "org/none")
    assert done.returncode == 3
    assert "has no model org/none" in done.stderr.splitlines()[-1]


@pytest.mark.whole
def test_unreachable_hub_ends_serve_with_temporary_status(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = run("serve", "--port", "0", "--model", NAME)
    assert done.returncode == 75
    assert "can't be reached" in done.stderr.splitlines()[-1]


@pytest.mark.whole
def test_ask_leaves_last_words_to_daemon_that_it_started(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = run("ask", "--set", f"server.port={free_port()}", "--model", NAME, "Who?")
    assert done.returncode == 1
    *_, daemons, last = done.stderr.splitlines()
    assert f"can't be reached for {NAME}" in daemons
    assert "the daemon that was started for this has ended: see above, if it said why" in last


def test_pull_refuses_oversized_model_before_its_weights(hub: Hub) -> None:
    add(hub, NAME, model(), parameters={"BF16": 70_000_000_000})
    done = run("pull", NAME, "--set", "memory.max_bytes=8000000000")
    assert done.returncode == 3
    assert "was not downloaded: the weights do not fit: they take 261 GiB" in done.stderr
    assert "7.45 GiB are allowed" in done.stderr
    assert set(hub.sent_bytes) <= {"config.json"}


@pytest.mark.whole
def test_pull_refuses_unknown_family_before_its_weights(hub: Hub) -> None:
    add(hub, NAME, model(model_type="no_such_family"))
    done = run("pull", NAME)
    assert done.returncode == 3
    assert "mlx-vlm has no family 'no_such_family'" in done.stderr
    assert set(hub.sent_bytes) <= {"config.json"}


@pytest.mark.whole
def test_models_commands_pull_list_check_and_remove(hub: Hub, tmp_path: Path) -> None:
    commit = add(hub, NAME, demo_files())
    looked = run("models", "check", NAME)
    assert looked.returncode == 0, looked.stderr
    assert f"commit {commit}" in looked.stdout
    assert looked.stdout.splitlines()[-1].startswith(f"The weights of {NAME} fit; ")
    assert looked.stdout.endswith("vlm-server pull org/shapes\n")
    assert set(hub.sent_bytes) <= {"config.json"}
    pulled = run("pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    assert commit in pulled.stdout
    listed = run("models", "list").stdout.splitlines()
    assert listed[1].split() == [NAME, "15", "MB", "qwen3_vl", "float16", "hub", "cache"]
    assert listed[2].split() == ["demo", "15", "MB", "qwen3_vl", "float16", "vlm-server"]
    hub.requests.clear()
    checked = run("models", "check", NAME)
    assert checked.returncode == 0, checked.stderr
    assert "qwen3_vl (checked: docs/families.md)" in checked.stdout
    assert "6144 of 6144 tokens fit" in checked.stdout
    assert checked.stdout.index("fit") < checked.stdout.index("Loaded in")
    shape, _, others = checked.stdout.partition("A red circle:")[2].partition("Three blue")
    assert "circle" in shape
    assert "HELLO" in others.partition("is written here?")[2]
    assert checked.stdout.endswith(f"\n{NAME} fits; it was loaded and tried.\n")
    assert not hub.requests
    refused = subprocess.run(
        [sys.executable, "-m", "vlm_server.cli", "models", "rm", NAME],
        input="n\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "Nothing was removed" in refused.stdout
    assert run("models", "rm", NAME, "--yes").returncode == 0
    assert not list((tmp_path / "hf/hub").glob("models--*"))
    assert "is not in the hub's cache" in run("models", "rm", NAME, "--yes").stderr


def test_models_check_asks_text_model_without_pictures() -> None:
    checked = run("models", "check", str(cached("llama")))
    assert checked.returncode == 0, checked.stderr
    assert "llama (checked: docs/families.md)" in checked.stdout
    assert "The capital of France: What is the capital of France?\n  " in checked.stdout
    assert "circle" not in checked.stdout


@pytest.mark.parametrize(
    ("limit_bytes", "code", "words"),
    [
        pytest.param(
            *(20_000_000, 3, "the weights do not fit: they take 29 MiB"), marks=pytest.mark.whole
        ),
        (32_000_000, 3, "leaves no room for requests: beside its weights 1 MiB"),
        pytest.param(40_000_000, 0, " of 6144 tokens fit", marks=pytest.mark.whole),
    ],
)
def test_models_check_reports_too_small_memory_with_figures(
    limit_bytes: int, code: int, words: str
) -> None:
    limit = f"memory.max_bytes={limit_bytes}"
    done = run("models", "check", str(EMBEDDED), "--no-load", "--set", limit)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    verdict = "vlm-server: demo can't be served here: the " if code else "demo fits; "
    assert (done.stdout + done.stderr).splitlines()[-1].startswith(verdict)


def test_models_check_knows_embedded_model_by_name() -> None:
    done = run("models", "check", "demo", "--no-load")
    assert done.returncode == 0, done.stderr
    assert f"folder   {EMBEDDED}" in done.stdout
    assert "qwen3_vl (checked" in done.stdout


@pytest.mark.whole
def test_check_config_finds_truncated_model(tmp_path: Path) -> None:
    """In `[model]`, and among the models that are loaded later."""
    folder = shutil.copytree(EMBEDDED, tmp_path / "model")
    whole = run("check-config", "--model", str(folder))
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.endswith("The settings are valid.\n")
    weights = next(folder.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1)
    for words in (("--model", str(folder)), ("--set", f"models.later.path={folder}")):
        broken = run("check-config", *words)
        assert (broken.returncode, broken.stdout) == (3, ""), broken
        assert "is cut short" in broken.stderr
