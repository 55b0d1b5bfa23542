"""Qwen's images become the same bits on the device as mlx-vlm makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

from tests.integration.harness import load_model
from tests.support.images import random_image
from tests.tiny_models.fixtures import TinyModel
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.runner.families.table import FAMILIES
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.processors import ModelProcessor
from vlm_server.runner.vision.patches import PatchProcessor, PixelValues, use_fast_patches

LoadTiny = Callable[[str], tuple[LoadedModel, MultimodalPreparer]]

KINDS = {
    "qwen2": {"patch_size": 14, "image_mean": [0.48, 0.457, 0.408], "image_std": [0.27, 0.26, 0.3]},
    "qwen3": {"patch_size": 16},
    "small": {"patch_size": 14, "max_pixels": 28 * 28 * 12},
    "three frames": {"patch_size": 14, "temporal_patch_size": 3},
}


@pytest.mark.parametrize("size", [(84, 84), (112, 56), (101, 77), (5, 9), (640, 31)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_patch_processor_pixels_equal_mlx_vlms_bit_for_bit(
    kind: dict[str, object], size: tuple[int, int]
):
    own, ours = Qwen3VLImageProcessor(**kind), PatchProcessor(**kind)
    made, expected = ours([random_image(1, *size)]), own([random_image(1, *size)])
    values = np.array(PixelValues(own)(made["pixel_bytes"]))
    assert values.dtype == expected["pixel_values"].dtype == np.float32
    assert values.tobytes() == expected["pixel_values"].tobytes()
    assert made["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()


def test_patch_processor_batches_equal_mlx_vlms():
    images = [random_image(1, 84, 84), random_image(2, 56, 112)]
    own, ours = Qwen3VLImageProcessor(patch_size=14), PatchProcessor(patch_size=14)
    values = PixelValues(own)(ours(images)["pixel_bytes"])
    assert np.array_equal(np.array(values), own(images)["pixel_values"])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_images_without_tokenizing_equal_processor_output(load_tiny: LoadTiny, family: str):
    """Their placeholder tokens come from the first image, without tokenizing."""
    loaded, preparer = load_tiny(family)
    placeholder = preparer._prompts.template.placeholder
    ours = ModelProcessor(loaded.processor, loaded.spec.image_token_id)
    ours.image(np.asarray(random_image(1, 64, 64)), placeholder)
    assert ours._around[placeholder] is not None
    for number, size in enumerate([(84, 84), (300, 100), (77, 201)]):
        pixels = np.asarray(random_image(number, *size))
        made = ours.image(pixels, placeholder)
        its_own = ModelProcessor(loaded.processor, loaded.spec.image_token_id)
        expected = its_own.image(pixels, placeholder)
        assert made.token_ids.dtype == expected.token_ids.dtype
        assert made.token_ids.tolist() == expected.token_ids.tolist()
        assert made.size == expected.size
        assert made.inputs.keys() == expected.inputs.keys()
        for name, array in made.inputs.items():
            assert np.array_equal(array, expected.inputs[name])


class _Processor:
    def __init__(self, image_processor: object) -> None:
        self.image_processor = image_processor


def test_patch_processor_keeps_processors_settings(tiny_model: TinyModel):
    model = load_model(tiny_model("qwen2_vl")).model
    processor = _Processor(Qwen3VLImageProcessor(**KINDS["small"]))
    before = dict(vars(processor.image_processor))
    use_fast_patches(processor, model.vision_tower)
    assert type(processor.image_processor) is PatchProcessor
    assert vars(processor.image_processor) == before


class _Other(Qwen3VLImageProcessor):
    pass


@pytest.mark.parametrize(
    ("image_processor", "family"),
    [
        (_Other(), "qwen2_vl"),
        (Qwen3VLImageProcessor(do_normalize=False), "qwen2_vl"),
        (Qwen3VLImageProcessor(do_rescale=False), "qwen2_vl"),
    ],
    ids=["another class", "not normalized", "not rescaled"],
)
def test_unsupported_image_processors_are_not_replaced(
    load_tiny: LoadTiny, image_processor: Qwen3VLImageProcessor, family: str
):
    processor = _Processor(image_processor)
    use_fast_patches(processor, load_tiny(family)[0].model.vision_tower)
    assert processor.image_processor is image_processor


def test_family_without_own_tower_keeps_its_image_processor(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
):
    """Only our tower can read the patch processor's bytes."""
    row = replace(FAMILIES["qwen2_vl"], tower=None)
    monkeypatch.setitem(FAMILIES, "qwen2_vl", row)
    loaded = load_model(tiny_model("qwen2_vl"))
    assert type(loaded.processor.image_processor) is Qwen3VLImageProcessor


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_loaded_qwen_models_use_patch_processor(load_tiny: LoadTiny, family: str):
    assert type(load_tiny(family)[0].processor.image_processor) is PatchProcessor
