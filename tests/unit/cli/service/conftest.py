"""The tests may themselves run from a temporary folder, which a service may not."""

from __future__ import annotations

import pytest

from vlm_server.cli.service import program


@pytest.fixture(autouse=True)
def our_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TEMPORARY", ())
