"""Our vision towers give mlx-vlm's rows for any grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.qwen2_5_vl.vision import MLP, VisionModel

from tests.integration.harness import ask, encode_works, new_preparer
from tests.integration.segments import attend_to_segments
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.errors import InternalError
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.runner.backends import backend_of
from vlm_server.runner.backends.cpu import attention_on_cpu
from vlm_server.runner.backends.cuda import kernels
from vlm_server.runner.backends.cuda.attention import CudaBackend
from vlm_server.runner.backends.metal import MetalBackend
from vlm_server.runner.backends.rope import image_rope
from vlm_server.runner.device.device import current_device
from vlm_server.runner.encode.encoder import ImageEncoder
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.vision import attention
from vlm_server.runner.vision.grids import window_layout
from vlm_server.runner.vision.towers import (
    FrameTower,
    GlmTower,
    WindowTower,
    fast_tower_of,
)

pytestmark = pytest.mark.families("tower")

LoadTiny = Callable[[str], tuple[LoadedModel, MultimodalPreparer]]
LoadMlxVlms = Callable[[str], LoadedModel]
Rows = list[mx.array]

QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
FAMILIES = (*QWENS, "glm4v")

GRIDS = {
    "one token": (1, 2, 2),
    "less than a window": (1, 4, 6),
    "one window": (1, 8, 8),
    "whole windows": (1, 16, 24),
    "whole windows down, not across": (1, 16, 10),
    "whole windows across, not down": (1, 14, 8),
    "cut windows at both edges": (1, 30, 22),
    "tall": (1, 60, 2),
    "wide": (1, 4, 50),
    "frames": (3, 10, 12),
    "frames of whole windows": (2, 8, 8),
}


@pytest.fixture(scope="session", params=FAMILIES)
def towers(
    request: pytest.FixtureRequest, load_tiny: LoadTiny, load_mlx_vlms: LoadMlxVlms
) -> tuple[FrameTower, nn.Module]:
    """Our tower and mlx-vlm's own, with the same weights."""
    ours = load_tiny(request.param)[0].model.vision_tower
    own = load_mlx_vlms(request.param).model.vision_tower
    assert isinstance(ours, FrameTower)
    assert not isinstance(own, FrameTower)
    return ours, own


def pixels(tower: nn.Module, *grids: tuple[int, int, int]) -> mx.array:
    patches = sum(frames * height * width for frames, height, width in grids)
    side = tower.patch_embed.patch_size
    values = np.random.default_rng(patches).normal(size=(patches, 3 * 2 * side**2))
    return mx.array(values.astype(np.float32))


def rows_of(tower: nn.Module, patches: mx.array, *grids: tuple[int, int, int]) -> Rows:
    """The rows, and those of deepstack."""
    if isinstance(tower, FrameTower):
        encoded = tower.encode(patches, np.array(grids))
        return [encoded.rows, *encoded.deepstack]
    rows = tower(patches, mx.array(grids))
    return [rows[0], *rows[1]] if isinstance(rows, tuple) else [rows]


def distance(these: Rows, those: Rows) -> float:
    assert [a.shape for a in these] == [b.shape for b in those]
    return max(float(mx.abs(a - b).max().item()) for a, b in zip(these, those, strict=True))


# ---- equal to mlx-vlm's --------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_tower_rows_equal_mlx_vlms(
    towers: tuple[FrameTower, nn.Module], grid: tuple[int, int, int]
):
    ours, own = towers
    if isinstance(ours, GlmTower) and grid[0] > 1:
        pytest.skip("mlx-vlm 0.7.10 can't tell frames apart there")
    patches = pixels(own, grid)
    assert distance(rows_of(ours, patches, grid), rows_of(own, patches, grid)) < 1e-5


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_tower_rows_are_equal_with_one_call_for_all_windows(
    monkeypatch: pytest.MonkeyPatch, load_mlx_vlms: LoadMlxVlms, grid: tuple[int, int, int]
):
    used = []

    def at_once(*arguments: Any) -> mx.array:
        used.append(arguments)
        return attend_to_segments(*arguments)

    backend = backend_of(current_device())
    monkeypatch.setattr(kernels, "takes_segments", lambda *_: True)
    monkeypatch.setattr(backend, "segment_blocks", CudaBackend().segment_blocks)
    monkeypatch.setattr(backend, "attend_to_segments", at_once)
    own = load_mlx_vlms("qwen2_5_vl").model.vision_tower
    ours = WindowTower(own, backend)
    patches = pixels(own, grid)
    assert distance(rows_of(ours, patches, grid), rows_of(own, patches, grid)) < 1e-5
    assert used


@pytest.mark.parametrize(
    "grids",
    [[(1, 10, 12), (1, 4, 6), (1, 8, 8)], [(1, 4, 6), (1, 4, 6), (1, 8, 8)]],
    ids=["of three sizes", "of two sizes"],
)
def test_tower_rows_of_several_images_equal_mlx_vlms(
    towers: tuple[FrameTower, nn.Module], grids: list[tuple[int, int, int]]
):
    ours, own = towers
    patches = pixels(own, *grids)
    assert distance(rows_of(ours, patches, *grids), rows_of(own, patches, *grids)) < 1e-5


def test_tower_rows_of_frame_equal_frame_alone(towers: tuple[FrameTower, nn.Module]):
    tower, _ = towers
    together = pixels(tower, (3, 10, 12))
    rows = rows_of(tower, together, (3, 10, 12))
    for number in range(3):
        patches = together[number * 120 : (number + 1) * 120]
        alone = rows_of(tower, patches, (1, 10, 12))
        here = [layer[number * 30 : (number + 1) * 30] for layer in rows]
        assert distance(here, alone) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_image_features_equal_those_mlx_vlm_gives_its_text_model(
    load_tiny: LoadTiny, load_mlx_vlms: LoadMlxVlms, family: str
):
    encoded, own = (
        ImageEncoder(loaded).encode([work])[0]
        for loaded, preparer in (
            load_tiny(family),
            (load_mlx_vlms(family), new_preparer(load_mlx_vlms(family))),
        )
        for work in encode_works(preparer, ask("a", random_image(1, 200, 140), "what?"))
    )
    assert distance([encoded.rows], [own.rows]) < 1e-5
    assert (encoded.deepstack is None) == (own.deepstack is None)
    if encoded.deepstack is not None:
        assert distance([encoded.deepstack], [own.deepstack]) < 1e-5
        assert encoded.visual_mask.tolist() == own.visual_mask.tolist()


def test_wrong_number_of_tower_rows_is_refused(load_tiny: LoadTiny):
    loaded, preparer = load_tiny("qwen2_5_vl")
    (work,) = encode_works(preparer, ask("a", random_image(1), "what?"))
    shorter = replace(work.span, end=work.span.end - 1)
    prompt = replace(work.prompt, spans=(shorter,))
    with pytest.raises(InternalError, match="tokens got"):
        ImageEncoder(loaded).encode([replace(work, prompt=prompt)])


def test_bfloat16_tower_rows_are_as_exact_as_mlx_vlms(load_mlx_vlms: LoadMlxVlms):
    own = load_mlx_vlms("qwen2_5_vl").model.vision_tower
    half = VisionModel(own.config)
    half.update(own.parameters())
    half.set_dtype(mx.bfloat16)
    grid = (1, 30, 22)
    patches = pixels(own, grid)
    rows = rows_of(WindowTower(half, backend_of(current_device())), patches, grid)
    theirs = rows_of(half, patches.astype(mx.bfloat16), grid)
    assert rows[0].dtype == theirs[0].dtype == mx.bfloat16
    exact = rows_of(own, patches, grid)
    assert distance(rows, exact) < 1.5 * distance(theirs, exact)


@pytest.mark.parametrize("size", [16, 64, 72, 80, 128, 160])
@pytest.mark.parametrize("patches", few_of([1, 64, 900], [1, 64]))
def test_metal_tower_attention_equals_cpu_attention(patches: int, size: int):
    """900 patches are more than are worked on at once on a CPU."""
    q, k, v = (mx.random.normal((2, 3, patches, size), key=mx.random.key(n)) for n in range(3))
    on_gpu, on_cpu = MetalBackend().attend(q, k, v, 0.3), attention_on_cpu(q, k, v, 0.3)
    assert distance([on_gpu], [on_cpu]) < 2e-5


@pytest.mark.parametrize("size", [64, 72, 80, 96, 128])
def test_head_sizes_fused_by_metal_are_not_padded(monkeypatch: pytest.MonkeyPatch, size: int):
    """Sizes that `ScaledDotProductAttention::has_fused_kernel` of MLX 0.32 names, up to 128."""
    sizes = sizes_attended_to(monkeypatch, size)
    assert sizes == {size}


@pytest.mark.parametrize(("size", "fused"), [(32, 64), (88, 96), (112, 128), (160, 160)])
def test_unfused_head_sizes_are_padded_to_next_fused_size(
    monkeypatch: pytest.MonkeyPatch, size: int, fused: int
):
    assert sizes_attended_to(monkeypatch, size) == {fused}


def sizes_attended_to(monkeypatch: pytest.MonkeyPatch, size: int) -> set[int]:
    """Head sizes that MLX gets of one layer of a tower on Metal, with heads of `size`."""
    real, sizes = mx.fast.scaled_dot_product_attention, set()

    def spy(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        sizes.update(each.shape[-1] for each in (q, k, v))
        return real(q, k, v, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spy)
    hidden = 2 * size
    layer = SimpleNamespace(
        qkv=nn.Linear(hidden, 3 * hidden), proj=nn.Linear(hidden, hidden), num_heads=2, scale=0.3
    )
    x = mx.random.normal((1, 12, hidden))
    rope = image_rope(np.zeros((12, 2), dtype=np.int32), size)
    output = attention.attend(layer, x, rope, attention.Segments(((2, 4), (1, 4))), MetalBackend())
    assert output.shape == x.shape
    return sizes


@pytest.mark.parametrize("bias", [True, False])
def test_padded_layer_output_is_unchanged(bias: bool):
    mlp = MLP(16, 30)
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear = getattr(mlp, name)
        linear.bias = mx.random.normal(linear.bias.shape)
        if not bias:
            del linear.bias
    x = mx.random.normal((5, 16))
    expected = mlp(x)
    MetalBackend().prepare_mlp(mlp)
    assert mlp.gate_proj.weight.shape == (64, 16)
    assert mlp.down_proj.weight.shape == (16, 64)
    assert distance([mlp(x)], [expected]) < 1e-6


@pytest.mark.parametrize("width", [64, 128])
def test_layer_without_need_of_padding_is_not_replaced(width: int):
    mlp = MLP(16, width)
    MetalBackend().prepare_mlp(mlp)
    assert mlp.gate_proj.weight.shape == (width, 16)


# ---- windows -------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (9, 8), (8, 11), (7, 6), (3, 2), (1, 13)])
def test_window_layout_places_tokens_in_exactly_one_window(rows: int, columns: int):
    layout = window_layout(rows, columns, 4)
    assert sorted(layout.order.tolist()) == list(range(rows * columns))
    start = 0
    for count, length in layout.windows:
        assert count * length > 0
        for tokens in layout.order[start : start + count * length].reshape(count, length):
            assert len({(token // columns // 4, token % columns // 4) for token in tokens}) == 1
        start += count * length
    assert start == rows * columns
    assert len(layout.windows) <= 4


# ---- towers that stay ----------------------------------------------------------------


def test_unknown_tower_is_not_replaced(load_mlx_vlms: LoadMlxVlms):
    class OtherTower(VisionModel):
        pass

    tower = OtherTower(load_mlx_vlms("qwen2_5_vl").model.config.vision_config)
    assert fast_tower_of(tower) is None
    assert fast_tower_of(None) is None
