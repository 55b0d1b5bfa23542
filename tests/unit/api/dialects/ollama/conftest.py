"""The front with a scripted engine, for Ollama's client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import ScriptedEngine


@pytest.fixture
async def host(engine: ScriptedEngine) -> AsyncIterator[str]:
    """The address of the front with `engine`; it needs no key."""
    async with listening(engine) as port:
        yield f"http://127.0.0.1:{port}"
