"""Tiny models, loaded once for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.integration.harness import Engine, NewEngine
from tests.tiny_models import FAMILIES
from tests.tiny_models.fixtures import TinyModel, tiny_model
from vlm_server.runner.loading import LoadedModel, load
from vlm_server.runner.preparer import MultimodalPreparer
from vlm_server.settings import Model

__all__ = ["tiny_model"]

SERVED = tuple(family for family in FAMILIES if family != "llava")
"""LLaVA's processor fails on every picture under this version of transformers."""


@pytest.fixture(scope="session")
def load_tiny(tiny_model: TinyModel) -> Callable[[str], tuple[LoadedModel, MultimodalPreparer]]:
    @cache
    def loaded(family: str) -> tuple[LoadedModel, MultimodalPreparer]:
        model = load(Model(path=str(tiny_model(family))))
        return model, MultimodalPreparer(model)

    return loaded


@pytest.fixture(params=SERVED, scope="session")
def served(
    request: pytest.FixtureRequest,
    load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]],
) -> tuple[LoadedModel, MultimodalPreparer]:
    """A loaded model of each family, and its preparer."""
    return load_tiny(request.param)


@pytest.fixture
def new_engine(served: tuple[LoadedModel, MultimodalPreparer]) -> NewEngine:
    """A function to a fresh engine on the family's model; its arguments are limits."""
    return lambda **limits: Engine(*served, **limits)
