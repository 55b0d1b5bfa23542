"""Our CUDA kernels match float32, and a row's numbers do not depend on its batch.

They run only where there is a CUDA GPU: `pytest -m gpu tests/integration/test_cuda_kernels.py`.
"""

from __future__ import annotations

import time

import mlx.core as mx
import pytest
from mlx_vlm.models.switch_layers import SwitchLinear

from vlm_server.runner.backends import rows
from vlm_server.runner.backends.cuda import attention_kernels, kernels, linear_kernels
from vlm_server.runner.backends.cuda.experts import use_expert_kernels
from vlm_server.runner.backends.dequantize import dequantize_for_many_rows
from vlm_server.runner.backends.gated_delta import gated_delta_in_chunks
from vlm_server.runner.backends.rows import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA GPU"),
]

DTYPES = [mx.bfloat16, mx.float16]


def normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def relative_distance(found: mx.array, expected: mx.array) -> float:
    found = found.astype(mx.float32)
    return float((mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "columns"), [(2048, 2560), (11008, 2048), (64, 300), (128, 7)])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 25, 32])
def test_few_row_products_match_float32(dtype: mx.Dtype, depth: int, columns: int, rows: int):
    x, weight = normal(rows, depth, dtype=dtype), normal(columns, depth, dtype=dtype)
    for bias in (None, normal(columns, dtype=dtype)):
        expected = x.astype(mx.float32) @ weight.astype(mx.float32).T
        expected = expected if bias is None else expected + bias
        found = linear_kernels.skinny_linear(x, weight, bias, (columns,))[0]
        assert found.shape == (rows, columns)
        assert relative_distance(found, expected) < 0.004
        alone = linear_kernels.skinny_linear(x[None, rows - 1 :], weight, bias, (columns,))[0]
        assert mx.array_equal(alone[0, 0], found[rows - 1])
        of_one = linear_kernels.skinny_linear(x[:, None], weight, bias, (columns,))[0]
        assert mx.array_equal(of_one[:, 0], found)
        for widths in [(3, columns - 3), (columns - 2, 1, 1)]:
            parts = linear_kernels.skinny_linear(x, weight, bias, widths)
            assert [part.shape for part in parts] == [(rows, width) for width in widths]
            assert mx.array_equal(mx.concatenate(parts, axis=-1), found)


@pytest.mark.parametrize("rows", [100, 4000])
def test_quantized_experts_match_float32(rows: int):
    experts = SwitchLinear(512, 256, 32, bias=False).to_quantized(group_size=64, bits=4)
    experts.set_dtype(mx.bfloat16)
    dense = mx.dequantize(experts.weight, experts.scales, experts.biases, 64, 4)
    dequantize_for_many_rows(experts)
    x, chosen = normal(rows, 1, 512, dtype=mx.bfloat16), mx.sort(mx.random.randint(0, 32, (rows,)))
    expected = x.astype(mx.float32) @ dense[chosen].astype(mx.float32).swapaxes(-1, -2)
    assert relative_distance(experts(x, chosen, sorted_indices=True), expected) < 0.004


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "group_size"), [(0, 0), (4, 64), (4, 32), (4, 128), (8, 64), (8, 128)]
)
@pytest.mark.parametrize(("depth", "columns"), [(512, 2048), (128, 72), (2048, 200)])
@pytest.mark.parametrize("rows", [70, 1000, 20_000])
@pytest.mark.parametrize("share_of_one", [0.03, 0.7])
def test_rows_of_experts_match_float32(
    dtype: mx.Dtype,
    bits: int,
    group_size: int,
    depth: int,
    columns: int,
    rows: int,
    share_of_one: float,
):
    dense = SwitchLinear(depth, columns, 32, bias=True)
    dense.bias = mx.random.normal((32, columns))
    experts = dense.to_quantized(group_size=group_size, bits=bits) if bits else dense
    experts.set_dtype(dtype)
    weight = experts.weight
    if bits:
        weight = mx.dequantize(weight, experts.scales, experts.biases, group_size, bits)
    use_expert_kernels(experts)
    is_of_one = mx.random.uniform(shape=(rows,)) < share_of_one
    chosen = mx.sort(mx.where(is_of_one, 5, mx.random.randint(0, 29, (rows,))).astype(mx.uint32))
    x = normal(rows, 1, depth, dtype=dtype)
    found = experts(x, chosen, sorted_indices=True)
    assert found.shape == (rows, 1, columns)
    some = mx.arange(0, rows, 1 + rows // 500)
    wide = weight[chosen[some]].astype(mx.float32).swapaxes(-1, -2)
    expected = x[some].astype(mx.float32) @ wide + experts.bias[chosen[some]][:, None]
    assert relative_distance(found[some], expected) < 0.006
    half = rows // 2
    alone = experts(x[half:], chosen[half:], sorted_indices=True)
    if rows - half > 2 * 32:
        assert mx.array_equal(alone, found[half:])


def test_experts_that_are_views_match_float32():
    experts = SwitchLinear(128, 72, 8, bias=False)
    experts.set_dtype(mx.bfloat16)
    experts.weight = mx.contiguous(experts.weight.swapaxes(1, 2)).swapaxes(1, 2)
    mx.eval(experts.weight)
    use_expert_kernels(experts)
    x, chosen = normal(300, 1, 128, dtype=mx.bfloat16), mx.sort(mx.random.randint(0, 8, (300,)))
    expected = x.astype(mx.float32) @ experts.weight[chosen].astype(mx.float32).swapaxes(1, 2)
    assert relative_distance(experts(x, chosen, sorted_indices=True), expected) < 0.006


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 32), (4, 128), (8, 64), (8, 128)])
@pytest.mark.parametrize(("depth", "columns"), [(2048, 2560), (11008, 2048), (128, 7)])
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 32])
def test_few_row_quantized_products_match_float32(
    dtype: mx.Dtype, bits: int, group_size: int, depth: int, columns: int, rows: int
):
    x, weight = normal(rows, depth, dtype=dtype), normal(columns, depth, dtype=dtype)
    packed, scales, offsets = mx.quantize(weight, group_size=group_size, bits=bits)
    packing = linear_kernels.Packing(scales, offsets, bits, group_size)
    wide = (each.astype(mx.float32) for each in (scales, offsets))
    weight = mx.dequantize(packed, *wide, group_size=group_size, bits=bits)
    for bias in (None, normal(columns, dtype=dtype)):
        expected = x.astype(mx.float32) @ weight.T
        expected = expected if bias is None else expected + bias
        found = linear_kernels.skinny_linear(x, packed, bias, (columns,), packing)[0]
        assert relative_distance(found, expected) < 0.006
        alone = linear_kernels.skinny_linear(x[rows - 1 :], packed, bias, (columns,), packing)[0]
        assert mx.array_equal(alone[0], found[rows - 1])
        parts = linear_kernels.skinny_linear(x, packed, bias, (3, columns - 3), packing)
        assert mx.array_equal(mx.concatenate(parts, axis=-1), found)


@pytest.mark.parametrize("dtype", [*DTYPES, mx.float32])
@pytest.mark.parametrize("key_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (5, 1), (2, 37), (1, 300)])
def test_gated_delta_kernel_equals_single_steps(
    dtype: mx.Dtype, key_size: int, rows: int, count: int
):
    size, heads = key_size**-0.5, 4
    q, k = (size * normal(rows, count, 2, key_size, dtype=dtype) for _ in "qk")
    both = normal(rows, count, 2 * heads * 72, dtype=dtype)
    v = both[..., heads * 72 :].reshape(rows, count, heads, 72)
    g, beta = (mx.random.uniform(shape=(rows, count, heads)) for _ in "gb")
    state = mx.random.normal((rows, heads, 72, key_size))
    wide = [each.astype(mx.float32) for each in (q, k, v)]
    expected = gated_delta_in_chunks(*wide, g, beta, state)
    found = kernels.gated_delta(q, k, v, g, beta, state)
    assert found[0].dtype == dtype
    assert found[1].dtype == mx.float32
    for mine, other in zip(found, expected, strict=True):
        assert relative_distance(mine, other) < 0.004
    alone = kernels.gated_delta(*(each[rows - 1 :] for each in (q, k, v, g, beta, state)))
    assert mx.array_equal(alone[0][0], found[0][rows - 1])


@pytest.mark.parametrize("dtype", [*DTYPES, mx.float32])
@pytest.mark.parametrize("dim", [128, 96, 32])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (5, 1), (2, 16), (1, 1200)])
def test_rope_kernel_rotates_heads_as_float32(dtype: mx.Dtype, dim: int, rows: int, count: int):
    queries = normal(rows, count, 16, 128, dtype=dtype).swapaxes(1, 2)
    keys = normal(rows, count, 2, 128, dtype=dtype).swapaxes(1, 2)
    angles = 500 * mx.random.uniform(shape=(rows, count, dim // 2))[:, None]
    cosines, sines = mx.cos(angles), mx.sin(angles)
    found = kernels.rotate_heads(queries, keys, cosines, sines)
    for mine, x in zip(found, (queries, keys), strict=True):
        assert mine.dtype == dtype
        first, second, rest = mx.split(x.astype(mx.float32), [dim // 2, dim], axis=-1)
        pairs = first * cosines - second * sines, second * cosines + first * sines
        assert relative_distance(mine, mx.concatenate([*pairs, rest], axis=-1)) < 0.004
    shared = kernels.rotate_heads(queries, keys, cosines[:1], sines[:1])
    for mine, whole in zip(shared, found, strict=True):
        assert mx.array_equal(mine[0], whole[0])
    by_columns = [mx.contiguous(each.swapaxes(2, 3)).swapaxes(2, 3) for each in (cosines, sines)]
    for mine, whole in zip(kernels.rotate_heads(queries, keys, *by_columns), found, strict=True):
        assert mx.array_equal(mine, whole)


HEADS = [(16, 2, 128), (4, 4, 64), (8, 8, 80), (12, 4, 96), (8, 4, 256), (8, 2, 512)]
"""Heads of queries, of keys, and their size."""
ROWS: dict[str, tuple[int, int, list[tuple[int, int, int]]]] = {
    "one row": (1, 256, [(0, 7, 1)]),
    "one long row": (1, 20224, [(0, 20000, 1)]),
    "rows of all lengths": (1, 1536, [(3, 4, 1), (0, 64, 1), (7, 136, 1), (0, 1536, 1)]),
    "dropped tokens": (1, 1024, [(-900, 1000, 1), (-1, 700, 1)]),
    "drafts": (16, 768, [(0, 700, 16), (20, 116, 16)]),
    "a chunk": (128, 1280, [(0, 1200, 128)]),
    "a padded chunk": (128, 512, [(0, 500, 41)]),
    "a long chunk": (1280, 3072, [(0, 3000, 1200)]),
    "a padded prompt": (32, 256, [(0, 9, 9)]),
}
"""Tokens, capacity, and the bounds of each row."""


def attend_in_float32(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    bounds: list[tuple[int, int, int]],
    window: int,
) -> mx.array:
    """Attention by matrix products in float32; `keys` and `values` have the new ones."""
    count, share = queries.shape[2], queries.shape[1] // keys.shape[1]
    queries, keys, values = (each.astype(mx.float32) for each in (queries, keys, values))
    keys, values = mx.repeat(keys, share, axis=1), mx.repeat(values, share, axis=1)
    columns = mx.arange(keys.shape[2])
    rows = []
    for row, (first, end, num_new) in enumerate(bounds):
        last = mx.minimum(end - num_new + mx.arange(count), end - 1)[:, None]
        mask = (columns <= last) & (columns >= first) & (columns > last - (window or end))
        scores = queries[row] @ keys[row].swapaxes(-1, -2) * queries.shape[-1] ** -0.5
        rows.append(mx.softmax(mx.where(mask, scores, -1e30), axis=-1) @ values[row])
    return mx.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [0, 64, 500])
def test_decode_kernel_writes_and_attends_to_new_tokens(
    dtype: mx.Dtype,
    heads: tuple[int, int, int],
    window: int,
    rows: tuple[int, int, list[tuple[int, int, int]]],
):
    (num_heads, groups, size), (count, capacity, bounds) = heads, rows
    queries = normal(len(bounds), count, num_heads, size, dtype=dtype).swapaxes(1, 2)
    new = [normal(len(bounds), count, groups, size, dtype=dtype).swapaxes(1, 2) for _ in "kv"]
    buffers = [normal(len(bounds), groups, capacity, size, dtype=dtype) for _ in "kv"]
    expected = [mx.array(each) for each in buffers]
    for side, fresh in zip(expected, new, strict=True):
        for row, (_, end, num_new) in enumerate(bounds):
            side[row, :, end - num_new : end] = fresh[row, :, :num_new]
    mx.eval(queries, new, buffers, expected)
    untouched = [mx.array(each) for each in buffers]
    mx.eval(untouched)
    views = tuple(each[:, :, :256] for each in buffers)
    scale = size**-0.5

    found = attention_kernels.append_and_attend(
        queries, tuple(new), views, scale, mx.array(bounds), window
    )
    mx.eval(found)
    for each, side in zip(buffers, expected, strict=True):
        for row, (_, end, _) in enumerate(bounds):
            kept = slice(max(end - window, 0) if window else 0, None)
            assert mx.array_equal(each[row, :, kept], side[row, :, kept])
    num_real = min(num_new for *_, num_new in bounds)
    wanted = attend_in_float32(queries, *expected, bounds, window)
    assert relative_distance(found[:, :, :num_real], wanted[:, :, :num_real]) < 0.006

    last = slice(len(bounds) - 1, None)
    alone = attention_kernels.append_and_attend(
        queries[last],
        tuple(each[last] for each in new),
        tuple(each[last] for each in untouched),
        scale,
        mx.array(bounds[-1:]),
        window,
    )
    assert mx.array_equal(alone[0, :, :num_real], found[-1, :, :num_real])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize(("count", "num_new", "start"), [(632, 632, 600), (300, 211, 0), (9, 4, 0)])
def test_mixed_step_rows_equal_rows_computed_alone(
    dtype: mx.Dtype,
    heads: tuple[int, int, int],
    window: int,
    num_rows: int,
    count: int,
    num_new: int,
    start: int,
):
    num_heads, groups, size = heads
    bounds = mx.array([[row, 40 + 150 * row, 1] for row in range(num_rows)])
    prompt_bounds = mx.array([[0, start + num_new, num_new]])
    tokens, scale = num_rows + count, size**-0.5
    queries = normal(tokens, num_heads, 1, size, dtype=dtype)
    new = [normal(tokens, 1, groups, size, dtype=dtype).swapaxes(1, 2) for _ in "kv"]
    rows = [normal(num_rows, groups, 1280, size, dtype=dtype) for _ in "kv"]
    prompt = [normal(1, groups, 1280, size, dtype=dtype) for _ in "kv"]
    apart = [[mx.array(each) for each in sides] for sides in (rows, prompt)]
    mx.eval(queries, new, rows, prompt, apart)

    def mine(array: mx.array) -> mx.array:
        return array[:num_rows]

    def theirs(array: mx.array) -> mx.array:
        return array[num_rows:].transpose(2, 1, 0, 3)

    expected = [
        attention_kernels.append_and_attend(
            part(queries), (part(new[0]), part(new[1])), (sides[0], sides[1]), scale, each, window
        )
        for part, sides, each in ((mine, apart[0], bounds), (theirs, apart[1], prompt_bounds))
    ]
    found = attention_kernels.append_and_attend_mixed(
        queries,
        (new[0], new[1]),
        ((rows[0], rows[1]), bounds),
        ((prompt[0], prompt[1]), prompt_bounds),
        scale,
        window,
    )
    mx.eval(found, expected)
    assert found.shape == queries.shape
    assert mx.array_equal(mine(found), expected[0])
    assert mx.array_equal(theirs(found)[:, :, :num_new], expected[1][:, :, :num_new])
    for together, alone in zip((*rows, *prompt), (*apart[0], *apart[1]), strict=True):
        assert mx.array_equal(together, alone)


SEGMENTS = {
    "windows of an image": [(63, 64), (7, 48), (9, 16), (1, 12)],
    "one that is short": [(1, 4)],
    "long ones": [(2, 300), (1, 65)],
}
"""Runs of so many, with as many patches each."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [80, 16, 128])
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_segment_kernel_attends_within_segments(
    dtype: mx.Dtype, size: int, frames: int, segments: list[tuple[int, int]]
):
    patches, heads = sum(count * length for count, length in segments), 4
    qkv = normal(frames, patches, 3, heads, size, dtype=dtype)
    queries, keys, values = (qkv[:, :, part] for part in range(3))
    blocks = mx.array(kernels.blocks_of(segments))
    found = kernels.attend_to_segments(queries, keys, values, blocks, size**-0.5)
    expected, start = [], 0
    for count, length in segments:
        for _ in range(count):
            q, k, v = (
                part[:, start : start + length].astype(mx.float32).swapaxes(1, 2)
                for part in (queries, keys, values)
            )
            weights = mx.softmax(q @ k.swapaxes(-1, -2) * size**-0.5, axis=-1)
            expected.append((weights @ v).swapaxes(1, 2))
            start += length
    assert found.dtype == dtype
    assert relative_distance(found, mx.concatenate(expected, axis=1)) < 0.006


RUNS = {
    "one that joins": [Run(0, 3, 0, 500, 12), Run(0, 1, 0, 290, 222, source=1)],
    "one that leaves": [Run(0, 1, 7, 505), Run(2, 1, 7, 505)],
    "of other lengths": [Run(0, 1, 0, 500, 0), Run(1, 1, 3, 400, 97), Run(2, 1, 499, 1, 499)],
    "copies": [Run(0, 1, 0, 290, source=1)] * 3,
}


@pytest.mark.parametrize("dtype", [*DTYPES, mx.float32])
@pytest.mark.parametrize("size", [128, 80, 8])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_row_kernel_arranges_rows_as_mlx(dtype: mx.Dtype, size: int, runs: list[Run]):
    running = [normal(3, 512, 4, size, dtype=dtype).swapaxes(1, 2) for _ in "kv"]
    prompt = [normal(1, 4, 320, size, dtype=dtype)[:, :, 20:] for _ in "kv"]
    sources = [tuple(running), tuple(prompt)]
    assert kernels.takes_rows(sources)
    made = rows.arrange(sources, runs, 512)
    for found, both in zip(made, zip(*sources, strict=True), strict=True):
        assert mx.array_equal(found, rows._arrange(both, runs, 512))


def test_rows_without_wide_alignment_are_left_to_mlx():
    side = normal(1, 2, 8, 12, dtype=mx.bfloat16)
    assert not kernels.takes_rows([(side, side)])


def test_mlx_loads_code_compiled_by_server():
    """MLX would compile it in seconds, if it looked for another file."""
    x, weight = normal(3, 128, dtype=mx.bfloat16), normal(72, 128, dtype=mx.bfloat16)
    mx.eval(x, weight)
    parts = linear_kernels.skinny_linear(x, weight, None, (24, 48))  # compiles it
    started = time.perf_counter()
    mx.eval(parts)
    assert time.perf_counter() - started < 0.5
