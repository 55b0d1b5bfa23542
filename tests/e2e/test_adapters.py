"""LoRA adapters of one model in one daemon, asked with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.adapters import as_peft, write_adapter
from tests.support.daemons import Daemon, running_daemon
from tests.support.images import one_shape, user
from vlm_server.models import EMBEDDED

pytestmark = pytest.mark.e2e

WHO = ("demo", "red", "blue")
LONG = " ".join(f"There are {n} red circles in row {n}." for n in range(20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the embedded model, in both layouts, and settings with them."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(EMBEDDED, folder / "red", 5)
    write_adapter(EMBEDDED, folder / "blue-mlx", 3, rank=8)
    as_peft(folder / "blue-mlx", folder / "blue")
    (folder / "settings.toml").write_text(
        '[models.red]\nbase = "demo"\nadapter = "red"\naliases = ["rot"]\n'
        '[models.blue]\nbase = "demo"\nadapter = "blue"\n'
    )
    return folder


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with running_daemon(folder, "--config", str(folder / "settings.toml")) as running:
        yield running


async def ask(client: openai.AsyncOpenAI, model: str, text: str = "What shape is this?") -> Any:
    messages = [user(one_shape("circle", "red"), text)]
    return await client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, temperature=0
    )


async def test_adapters_and_base_answer_at_once_as_alone(daemon: Daemon) -> None:
    async with daemon.async_client() as client:
        alone = {name: await ask(client, name) for name in WHO}
        texts = {name: alone[name].choices[0].message.content for name in WHO}
        assert len(set(texts.values())) == len(WHO)
        assert "circle" in texts["demo"]
        assert [alone[name].model for name in WHO] == list(WHO)
        answers = await asyncio.gather(*(ask(client, name) for name in WHO * 4))
        assert [each.choices[0].message.content for each in answers] == list(texts.values()) * 4
        assert (await ask(client, "rot")).choices[0].message.content == texts["red"]
        with pytest.raises(openai.NotFoundError, match="`demo`, `red`, `blue`"):
            await ask(client, "green")
    assert [model["pinned"] for model in daemon.status()["models"]] == [True] * 3


async def test_prefix_is_reused_by_same_adapter_alone(daemon: Daemon) -> None:
    async with daemon.async_client() as client:
        for turn in range(2):
            for name in WHO:
                usage = (await ask(client, name, LONG)).usage
                cached_tokens = usage.prompt_tokens_details.cached_tokens
                assert (cached_tokens > usage.prompt_tokens // 2) == bool(turn)


def test_models_list_adapters_with_their_base(daemon: Daemon) -> None:
    models = {model.id: model.model_dump() for model in daemon.client().models.list()}
    assert list(models) == list(WHO)
    parents = {name: (model["parent"], model["root"]) for name, model in models.items()}
    assert parents == {"demo": (None, "demo"), "red": ("demo", "red"), "blue": ("demo", "blue")}
    assert daemon.client().models.retrieve("red").model_dump()["parent"] == "demo"
    tags = daemon.get("/api/tags")[1]["models"]
    assert [model["details"]["parent_model"] for model in tags] == ["", "demo", "demo"]
    described = daemon.status()["models"]
    assert [model["base"] for model in described] == [None, "demo", "demo"]
    assert [bool(model["memory_bytes"]) for model in described] == [True, False, False]
    _, status = daemon.get("/v1/status?model=red")
    assert status["model"] == "red"


def test_check_tells_whether_adapter_fits_its_base(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vlm_server.cli", "models", "check", "--no-load"]
    command += [str(EMBEDDED), "--adapter"]
    fitting = subprocess.run([*command, str(folder / "red")], capture_output=True, text=True)
    assert fitting.returncode == 0, fitting.stderr
    assert "adapters  red\n" in fitting.stdout
    config = json.loads((folder / "red" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"fine_tune_type": "dora"}))
    (tmp_path / "adapters.safetensors").write_bytes(
        (folder / "red" / "adapters.safetensors").read_bytes()
    )
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "only 'lora' can be served" in refused.stderr


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('base = "demo"\nadapter = "nowhere"', "is no adapter: it has no adapter_config.json"),
        ('base = "other"\nadapter = "red"', "is none of `demo`"),
    ],
)
def test_daemon_with_wrong_adapter_does_not_start(
    table: str, message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "red").symlink_to(folder / "red")
    (tmp_path / "settings.toml").write_text(f"[models.x]\n{table}\n")
    command = [sys.executable, "-m", "vlm_server.cli", "serve", "--port", "0"]
    command += ["--config", str(tmp_path / "settings.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert message in ended.stderr
