"""`tiny_model("qwen3_vl")` → a checkpoint's folder, built once per session.

A test module gets the fixture by importing it, or a conftest by naming this module in
`pytest_plugins`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.tiny_models import build

TinyModel = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A function from a family's name to a folder that `mlx_vlm.load` reads."""

    @cache
    def built(family: str) -> Path:
        return build(family, tmp_path_factory.mktemp(family))

    return built
