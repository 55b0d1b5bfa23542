"""Tiny models, loaded once for the whole session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx_vlm
import numpy as np
import pytest

from tests.integration.harness import EngineHarness, NewEngine, load_model, new_preparer
from tests.integration.prompts import LONGER, PROMPTS, answer_in_pairs, prompt_request
from tests.tiny_models import FAMILIES
from tests.tiny_models.fixtures import TinyModel, tiny_model
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.checkpoint.files import image_settings
from vlm_server.runner.loading.processors import ModelProcessor

__all__ = ["tiny_model"]

UNNEEDED_MODULES = ("cv2", "datasets", "miniaudio", "mlx_audio", "pandas", "pyarrow", "scipy")
"""The modules of packages that packaging/overrides.txt leaves out, with what only they require."""


@pytest.fixture(scope="session", autouse=True)
def without_unneeded_packages() -> Iterator[None]:
    """Imports of these modules fail, as where their packages are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in UNNEEDED_MODULES:
            patch.setitem(sys.modules, name, None)
        yield


class OneByOne:
    """An image processor that is handed a prompt's images one after the other.

    mlx-vlm's of PaddleOCR-VL fails for images of several sizes, and counts wrongly for others.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.merge_size = inner.merge_size
        self.patch_size = inner.patch_size

    def __call__(self, images: list[Any]) -> dict[str, Any]:
        made = [self._inner(images=[image]) for image in images]
        return {
            "pixel_values": np.concatenate([each["pixel_values"] for each in made], axis=1),
            "image_grid_thw": np.concatenate([each["image_grid_thw"] for each in made]),
        }


@pytest.fixture(scope="session")
def load_tiny(tiny_model: TinyModel) -> Callable[[str], tuple[LoadedModel, MultimodalPreparer]]:
    @cache
    def loaded(family: str) -> tuple[LoadedModel, MultimodalPreparer]:
        model = load_model(tiny_model(family))
        return model, new_preparer(model)

    return loaded


@pytest.fixture(scope="session")
def load_mlx_vlms(
    tiny_model: TinyModel, load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]]
) -> Callable[[str], LoadedModel]:
    """The same model with every module mlx-vlm's own, to compare with; its processor too.

    It is encoded by its own `get_input_embeddings`.
    """

    @cache
    def loaded(family: str) -> LoadedModel:
        model, processor = mlx_vlm.load(str(tiny_model(family)))
        ours = load_tiny(family)[0]
        if ours.family.fix:
            ours.family.fix(model, processor, image_settings(tiny_model(family)))
        if family == "paddleocr_vl":
            processor.image_processor = OneByOne(processor.image_processor)
        model.set_dtype(mx.float32)
        its_own = ModelProcessor(processor, ours.spec.image_token_id, ours.spec.stand_in)
        return replace(
            ours,
            model=model,
            processor=processor,
            family=replace(ours.family, tower=None),
            spec=replace(ours.spec, process_image=its_own.image, process_video=its_own.video),
        )

    return loaded


@pytest.fixture(params=FAMILIES, scope="session")
def family(request: pytest.FixtureRequest) -> str:
    """The name of each family."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def served(
    family: str, load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]]
) -> tuple[LoadedModel, MultimodalPreparer]:
    """A loaded model of each family, and its preparer."""
    return load_tiny(family)


@pytest.fixture(scope="session")
def mlx_vlms(family: str, load_mlx_vlms: Callable[[str], LoadedModel]) -> LoadedModel:
    """The model of `served`, with mlx-vlm's own modules."""
    return load_mlx_vlms(family)


@pytest.fixture
def new_engine(served: tuple[LoadedModel, MultimodalPreparer]) -> NewEngine:
    """A function to a fresh engine on the family's model; its arguments are limits."""
    return lambda **limits: EngineHarness(*served, **limits)


@pytest.fixture(scope="session")
def new_qwen_engine(
    load_tiny: Callable[[str], tuple[LoadedModel, MultimodalPreparer]],
) -> Callable[[], EngineHarness]:
    """A function to a fresh engine of one family, for tests of what families share."""
    return lambda: EngineHarness(*load_tiny("qwen3_vl"))


@pytest.fixture(scope="session")
def answered(served: tuple[LoadedModel, MultimodalPreparer]) -> EngineHarness:
    """An engine that has answered all PROMPTS, each alone and prefilled whole."""
    engine = EngineHarness(*served)
    for name in PROMPTS:
        engine.answer(prompt_request(name, LONGER))
    return engine


@pytest.fixture(scope="session")
def answered_in_pairs(served: tuple[LoadedModel, MultimodalPreparer]) -> list[list[int]]:
    """The result of `answer_in_pairs` without chunks and caches."""
    return answer_in_pairs(EngineHarness(*served))
