"""The shared daemon and one hub for all pages, and a folder for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.sandbox import Sandbox
from tests.hub.server import add, running_hub
from tests.support.daemons import Daemon
from vlm_server.models import EMBEDDED

NAMES = ("mlx-community/Qwen3-VL-4B-Instruct-4bit", "org/shapes")
"""Of models that pages download: here they are the embedded one."""


@pytest.fixture(scope="session")
def hub_url() -> Iterator[str]:
    files = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
    with running_hub() as hub:
        for name in NAMES:
            add(hub, name, files)
        yield hub.url


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def sandbox(tmp_path: Path, daemon: Daemon, hub_url: str, home: Path) -> Sandbox:
    made = Sandbox(tmp_path, daemon.port, home, hub_url)
    made.prepare()
    return made
