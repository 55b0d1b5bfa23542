"""Our CUDA kernels are compiled into the files that MLX looks for."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx
import pytest

from vlm_server.runner.backends.cuda import compiler
from vlm_server.runner.backends.cuda.compiler import Code, Kernel, hash_of, in_parallel, provide

KERNEL = Kernel(
    "vlm_scale",
    ["x", "factor"],
    ["y"],
    "scale(x, x_shape[0], x_strides, factor_ndim, y);",
    "// the header\n",
    shared_memory=0,
    is_strided=True,
)
TEXT = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

// the header
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_vlm_scale_bfloat16_t_64_t(
    const __nv_bfloat16* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ Strides x_strides,
    const float* factor,
    __nv_bfloat16* y) {
  using T = __nv_bfloat16;
  constexpr int D = 64;
  constexpr bool IS_ONE = true;

scale(x, x_shape[0], x_strides, factor_ndim, y);
}

} // namespace mlx::core::cu
"""


def code() -> Code:
    template = [("T", mx.bfloat16), ("D", 64), ("IS_ONE", True)]
    return KERNEL.code([(mx.bfloat16, True), (mx.float32, False)], template, [mx.bfloat16])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0x553E93901E462A6E),
        ("a", 0x454DDEE488C1ED6B),
        ("abcdefgh", 0x783DB3E38DB898BB),
        ("abcdefghi", 0xB4EC9257851C8AAF),
    ],
)
def test_kernel_name_hash_equals_libstdcxx_hash(text: str, expected: int):
    assert hash_of(text.encode()) == expected


def test_kernel_source_equals_mlx_source():
    assert code().text == TEXT
    assert code().function == "mlx::core::cu::custom_kernel_vlm_scale_bfloat16_t_64_t"
    assert code().module == f"custom_kernel_vlm_scale_bfloat16_t_64_t_{hash_of(TEXT.encode()):x}"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Code]:
    """The codes that were compiled, by no compiler, into a folder of the test's own."""
    codes: list[Code] = []

    def compiled_code(_: object, __: object, code: Code, architecture: str) -> tuple[bytes, str]:
        assert architecture == "sm_90a"
        codes.append(code)
        return b"machine code", "_symbol"

    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiler, "compiled_code", compiled_code)
    monkeypatch.setattr(compiler, "_library", lambda: None)
    monkeypatch.setattr(compiler, "_architecture", lambda: "sm_90a")
    return codes


def test_kernel_is_compiled_once_into_mlx_folder(tmp_path: Path, compiled: list[Code]):
    provide(code())
    provide(code())
    assert compiled == [code()]
    module = tmp_path / "kernels" / code().module
    assert module.with_name(f"{module.name}.ptx").read_bytes() == b"machine code"
    text = module.with_name(f"{module.name}.txt").read_text()
    assert text == f"{code().function}\t_symbol\n"
    assert len(list(module.parent.iterdir())) == 2, "no temporary file is left"


def test_kernels_of_with_block_are_compiled_at_its_end(tmp_path: Path, compiled: list[Code]):
    others = [Code(f"{code().name}_{number}", TEXT) for number in range(4)]
    with in_parallel():
        for other in others:
            provide(other)
    assert {each.name for each in compiled} == {other.name for other in others}
    for other in others:
        assert (tmp_path / "kernels" / f"{other.module}.ptx").exists()


def test_kernel_that_fails_to_compile_is_left_to_mlx(
    tmp_path: Path,
    compiled: list[Code],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def fails(*_: object) -> tuple[bytes, str]:
        raise RuntimeError("NVRTC's error 6")

    monkeypatch.setattr(compiler, "compiled_code", fails)
    with caplog.at_level(logging.WARNING):
        provide(code())
    assert "NVRTC's error 6" in caplog.text
    assert not (tmp_path / "kernels").exists()
