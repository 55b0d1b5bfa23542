"""`tiny_model("qwen3_vl")` → a checkpoint's folder, built once for this clone.

A test module gets the fixture by importing it, or a conftest by naming this module in
`pytest_plugins`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import cached

TinyModel = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_model() -> TinyModel:
    """A function from a family's name to a read-only folder for `mlx_vlm.load`."""
    return cached
