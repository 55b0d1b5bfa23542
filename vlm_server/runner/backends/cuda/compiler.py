"""Compiles our CUDA kernels into MLX's folder of kernels, where MLX looks before it compiles.

MLX compiles a custom kernel in seconds at each start, as its headers are large; no other thread can
launch meanwhile; and it keeps only its own kernels on disk. Ours need few headers, so that they are
compiled in a fraction of that, several at a time, and are kept. The name of a kernel's file
contains the hash of the source that MLX makes of it, which is made here, too. If another MLX makes
another one, it finds no file and compiles the kernel itself. That the arguments are those of MLX,
`kernels.can_be_used` checks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

logger = logging.getLogger(__name__)

_MLX_HEADERS = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
"""What MLX includes in a custom kernel."""
_OUR_HEADERS = """
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long uintptr_t;
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace cooperative_groups {}
namespace mlx::core::cu {
template <typename T> struct Sizes {
  T sizes[10];
  __device__ T operator[](int i) const { return sizes[i]; }
};
using Shape = Sizes<int32_t>;
using Strides = Sizes<int64_t>;
}
"""
"""What our kernels need of them: types, with MLX's layout of shapes and strides."""
_TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}
_SHORT_TYPES = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}
"""Their names in those of kernels, where these differ."""
_LONGEST_NAME = 240
_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_HASH_SEED, _HASH_FACTOR = 0xC70F6907, 0xC6A4A7935BD1E995
_64_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel for inputs of known types. `text` is the source that MLX makes of it.

    function: its name in C++.
    """

    name: str
    text: str

    @property
    def function(self) -> str:
        return f"mlx::core::cu::{self.name}"

    @property
    def module(self) -> str:
        """MLX's name of the compiled code."""
        return f"{self.name}_{hash_of(self.text.encode()):x}"


class Kernel:
    """A kernel of MLX, `mx.fast.cuda_kernel`, whose code is compiled here."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        body: str,
        header: str,
        *,
        shared_memory: int,
        is_strided: bool,
    ) -> None:
        """`is_strided`: whether it takes inputs with any strides rather than contiguous."""
        self._name, self._inputs, self._outputs = name, inputs, outputs
        self._body, self._header = body, header
        self._known: set[Any] = set()
        """Types and constants for which the code was compiled."""
        self._shared_memory, self._is_strided = shared_memory, is_strided

    @cached_property
    def _launch(self) -> Any:
        return mx.fast.cuda_kernel(
            name=self._name,
            input_names=self._inputs,
            output_names=self._outputs,
            source=self._body,
            header=self._header,
            ensure_row_contiguous=not self._is_strided,
            shared_memory=self._shared_memory,
        )

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        output_dtypes: Sequence[mx.Dtype],
        **launch: Any,
    ) -> Any:
        """The outputs, lazy; see `mx.fast.cuda_kernel`."""
        types = [(array.dtype, array.ndim > 0) for array in inputs]
        key = *types, *template, *output_dtypes
        if key not in self._known:
            self._known.add(key)
            provide(self.code(types, template, output_dtypes))
        return self._launch(inputs=inputs, template=template, output_dtypes=output_dtypes, **launch)

    def code(
        self,
        inputs: Sequence[tuple[mx.Dtype, bool]],
        template: Sequence[tuple[str, Any]],
        outputs: Sequence[mx.Dtype],
    ) -> Code:
        """The code for inputs of (type, whether they have dimensions), as MLX's `build_kernel`."""
        name = f"custom_kernel_{self._name}" + "".join(f"_{_short(v)}" for _, v in template)
        parameters = []
        for (dtype, has_shape), input_ in zip(inputs, self._inputs, strict=True):
            parameters.append(f"    const {_TYPES[dtype]}* {input_}")
            for kind, type_ in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                if has_shape and f"{input_}_{kind}" in self._body:
                    parameters.append(f"    const __grid_constant__ {type_} {input_}_{kind}")
        for dtype, output in zip(outputs, self._outputs, strict=True):
            parameters.append(f"    {_TYPES[dtype]}* {output}")
        constants = "".join(map(_constant, template)) + ("\n" if template else "")
        text = (
            f"{_MLX_HEADERS}{self._header}namespace mlx::core::cu {{\n\n"
            f"namespace cg = cooperative_groups;\n\n__global__ void {name}(\n"
            + ",\n".join(parameters)
            + f") {{\n{constants}{self._body}\n}}\n\n}} // namespace mlx::core::cu\n"
        )
        return Code(name, text)


def _short(value: Any) -> str:
    """A constant in a kernel's name."""
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value) if isinstance(value, int) else _SHORT_TYPES.get(value, _TYPES[value])


def _constant(named: tuple[str, Any]) -> str:
    name, value = named
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"  constexpr int {name} = {value};\n"
    return f"  using {name} = {_TYPES[value]};\n"


def hash_of(data: bytes) -> int:
    """`std::hash` of a string in libstdc++: MurmurHash64A."""
    value = _HASH_SEED ^ (len(data) * _HASH_FACTOR & _64_BITS)
    whole_length = len(data) - len(data) % 8
    for start in range(0, whole_length, 8):
        part = int.from_bytes(data[start : start + 8], "little") * _HASH_FACTOR & _64_BITS
        value = (value ^ (part ^ part >> 47) * _HASH_FACTOR) * _HASH_FACTOR & _64_BITS
    if whole_length < len(data):
        value = (value ^ int.from_bytes(data[whole_length:], "little")) * _HASH_FACTOR & _64_BITS
    value = (value ^ value >> 47) * _HASH_FACTOR & _64_BITS
    return value ^ value >> 47


# ---- compiling ---------------------------------------------------------------------------------

_collected = threading.local()
"""`jobs`: those that `in_parallel` will wait for, on its thread."""


def provide(code: Code) -> None:
    """Compile `code` into MLX's folder, if it is not there; waits, except within `in_parallel`."""
    folder = kernels_folder()
    if len(code.module) > _LONGEST_NAME or (folder / f"{code.module}.ptx").exists():
        return
    jobs = getattr(_collected, "jobs", None)
    if jobs is None:
        _compile_or_log(code, folder)
    else:
        jobs.append(_threads().submit(_compile_or_log, code, folder))


@contextmanager
def in_parallel() -> Iterator[None]:
    """Compile the kernels that are first used in the block at the same time; waits at its end.

    Nothing may be evaluated in the block.
    """
    jobs: list[Future[None]] = []
    _collected.jobs = jobs
    try:
        yield
    finally:
        del _collected.jobs
        for job in jobs:
            job.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "kernel compiler")


def kernels_folder() -> Path:
    """Where MLX looks for compiled kernels."""
    folder = os.environ.get("MLX_PTX_CACHE_DIR")
    return Path(folder) if folder else Path(tempfile.gettempdir(), "mlx", version("mlx"), "ptx")


def _compile_or_log(code: Code, folder: Path) -> None:
    """Compile `code` into `folder`. A failure is logged: then MLX compiles it."""
    started_at = time.perf_counter()
    try:
        paths = _library(), _include_folders()
        compiled, symbol = compiled_code(*paths, code, _architecture())
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{code.module}.txt", f"{code.function}\t{symbol}\n".encode())
        _write(folder / f"{code.module}.ptx", compiled)  # MLX looks for it first
    except (AssertionError, LookupError, OSError, RuntimeError) as error:
        logger.warning("MLX is left to compile %s, which takes longer: %s", code.name, error)
        return
    logger.debug("compiled %s in %.1f s", code.name, time.perf_counter() - started_at)


def _write(path: Path, data: bytes) -> None:
    """Write a file that other processes see when it is complete."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)


def compiled_code(
    nvrtc: ctypes.CDLL, include_folders: Sequence[Path], code: Code, architecture: str
) -> tuple[bytes, str]:
    """The machine code, and the function's symbol in it. Raises RuntimeError."""
    source = code.text.replace(_MLX_HEADERS, _OUR_HEADERS, 1)
    program = ctypes.c_void_p()
    name = code.function.encode()
    options = [
        b"--device-as-default-execution-space",
        f"--gpu-architecture={architecture}".encode(),
        *(f"--include-path={folder}".encode() for folder in include_folders),
    ]
    arguments = (ctypes.c_char_p * len(options))(*options)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None))
    try:
        _check(nvrtc.nvrtcAddNameExpression(program, name))
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(log.rstrip(b"\0").decode(errors="replace"))
        symbol = ctypes.c_char_p()
        _check(nvrtc.nvrtcGetLoweredName(program, name, ctypes.byref(symbol)))
        assert symbol.value is not None
        cubin = _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return cubin, symbol.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _output(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC's error {status}")


@cache
def _library() -> ctypes.CDLL:
    """NVRTC as MLX has loaded it. Raises OSError."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
    raise OSError("NVRTC is not loaded")


def _architecture() -> str:
    """The device's, as MLX names it for NVRTC."""
    info = mx.device_info(mx.default_device())
    major, minor = (int(info[f"compute_capability_{part}"]) for part in ("major", "minor"))
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _include_folders() -> list[Path]:
    """The folders of CUDA's headers, as MLX finds them."""
    mlx = Path(mx.__file__).parent
    packages = [mlx.parent / "nvidia" / name / "include" for name in ("cu13", "cuda_runtime")]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    candidates = [mlx / "include" / "cccl", *packages, Path(home, "include")]
    return [folder for folder in candidates if folder.exists()]
