"""A fake hub with a small model, and an empty cache."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub.server import Hub, running_hub
from vlm_server.models import EMBEDDED

NAME = "org/model"
WEIGHTS = "model.safetensors"
_CONFIG = {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": 1}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub that child processes ask, with a cache and a home of their own."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def demo_files() -> dict[str, bytes]:
    """The files of the embedded model."""
    return {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}


def model(weight_bytes: int = 1 << 20, seed: int = 0, **config: object) -> dict[str, bytes]:
    """The files of a downloadable model, and some that no download needs."""
    return {
        "config.json": json.dumps(_CONFIG | config).encode(),
        "tokenizer.json": b"{}" * 1000,
        "chat_template.jinja": b"{{ messages }}",
        WEIGHTS: random.Random(seed).randbytes(weight_bytes),
        "README.md": b"# a model",
        "modeling.py": b"raise SystemExit",
        "original/consolidated.safetensors": b"x" * 1000,
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
