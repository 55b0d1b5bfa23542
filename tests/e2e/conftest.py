"""Daemons that tests share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.daemon import Daemon, running_daemon
from tests.tiny_models import build


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon as a person starts it, with the embedded model."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a random model, whose answers run on until their limit."""
    folder = tmp_path_factory.mktemp("tiny")
    with running_daemon(folder, "--model", str(build("qwen3_vl", folder / "model"))) as running:
        yield running
