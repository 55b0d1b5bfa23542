"""The shared daemon and one hub for all pages, and a folder for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.sandbox import Sandbox
from tests.hub.server import add, running_hub
from tests.support.daemons import Daemon, checkpoint
from vlm_server.models import EMBEDDED

EMBEDDING = "Qwen/Qwen3-VL-Embedding-2B"
"""The model that makes vectors on pages: here a tiny one of its family."""
NAMES = ("mlx-community/Qwen3-VL-4B-Instruct-4bit", "org/shapes")
"""Of models that pages download: here they are the embedded one."""


@pytest.fixture(scope="session")
def hub_url() -> Iterator[str]:
    files = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
    with running_hub() as hub:
        for name in NAMES:
            add(hub, name, files)
        tiny = [path for path in checkpoint("qwen3_vl_embedding").iterdir() if path.is_file()]
        add(hub, EMBEDDING, {path.name: path.read_bytes() for path in tiny})
        yield hub.url


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def sandbox(
    tmp_path: Path, daemon: Daemon, embedding_daemon: Daemon, hub_url: str, home: Path
) -> Sandbox:
    made = Sandbox(tmp_path, daemon.port, embedding_daemon.port, home, hub_url)
    made.prepare()
    return made
