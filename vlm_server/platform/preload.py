"""Finds libraries to preload into the engine, and tries them in a child process first.

A library that loads may still end the process on an instruction that this processor lacks, or not
do what it is for.

OpenBLAS is for Linux CPUs: MLX's CPU wheel links a reference BLAS, and with OpenBLAS float32 matrix
products are about 50 times faster. mimalloc is for CUDA: there MLX makes and gives up thousands of
small objects on the host for each step, in several threads, and glibc's heap took a third of the
time of launching. On a CPU the heap is where arrays lie, too, and encodes would take longer
(docs/decisions/0055).
"""

from __future__ import annotations

import logging
import os
import platform
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from vlm_server.platform.child import launch

logger = logging.getLogger(__name__)

_SECONDS = 20.0
_BLAS_PROBE = """
import ctypes
n = 64
a = (ctypes.c_float * (n * n))(*([0.5] * (n * n)))
c = (ctypes.c_float * (n * n))()
f = ctypes.c_float
ctypes.CDLL(None).cblas_sgemm(101, 111, 111, n, n, n, f(1), a, n, a, n, f(0), c, n)
raise SystemExit(0 if abs(c[n * n - 1] - n / 4) < 1e-3 else 1)
"""
_PACKAGE = "cmeel-mimalloc"
_LIBRARY = "cmeel.prefix/lib/libmimalloc.so.3"
_MLX_ON_CUDA = ("mlx-cuda-13", "mlx-cuda-12")
_MIMALLOC_PROBE = "import ctypes; ctypes.CDLL(None).mi_version()"


def find_openblas(links: Path) -> dict[str, str]:
    """Environment variables that preload a working OpenBLAS; empty if there is none.

    They may name the folder `links`, which must be writable for this user alone.
    Libraries that `LD_PRELOAD` already names are loaded after it.
    """
    if platform.system() != "Linux":
        return {}
    for candidate in _candidates(links):
        environment = {name: _prepend(name, path) for name, path in candidate.items()}
        if runs(_BLAS_PROBE, environment):
            logger.debug("preloading %s into the engine", candidate["LD_PRELOAD"])
            return environment
    logger.warning("no usable OpenBLAS found: the model will run about 50 times slower on the CPU")
    return {}


def _prepend(name: str, path: str) -> str:
    existing = os.environ.get(name)
    return f"{path}:{existing}" if existing else path


def _candidates(links: Path) -> Iterator[dict[str, str]]:
    """Environments to try, the fastest library first; `links` is for those that need some."""
    packages = Path(sysconfig.get_paths()["platlib"])
    for library in sorted((packages / "cmeel.prefix" / "lib").glob("libopenblas.so.0")):
        yield {"LD_PRELOAD": str(library)}
        if fortran := _link_fortran(packages, links):
            yield {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(fortran)}
    for library in sorted((packages / "opencv_python.libs").glob("libopenblas*.so*")):
        yield {"LD_PRELOAD": str(library)}
    for library in sorted(Path("/usr/lib").glob("*-linux-gnu/openblas-pthread/libopenblas.so.0")):
        yield {"LD_PRELOAD": str(library)}


def _link_fortran(packages: Path, links: Path) -> Path | None:
    """`links`, with the Fortran runtime of MLX's wheel under its usual file names."""
    folders = packages / "mlx_cpu.libs"
    bundled = [*folders.glob("libgfortran-*.so.*"), *folders.glob("libquadmath-*.so.*")]
    if not bundled:
        return None
    try:
        links.mkdir(mode=0o700, exist_ok=True)
        for library in bundled:
            name = library.name.partition("-")[0] + ".so." + library.name.partition(".so.")[2][:1]
            for link in (links / library.name, links / name):
                _link(link, library)
    except OSError:
        logger.debug("can't link the Fortran runtime", exc_info=True)
        return None
    return links


def _link(link: Path, library: Path) -> None:
    """Raises OSError. One that is right stays: another engine may be loading it."""
    if not (link.is_symlink() and link.readlink() == library):
        link.unlink(missing_ok=True)
        link.symlink_to(library)


def find_mimalloc() -> str | None:
    """The library's file, if MLX is for CUDA here and a process starts with it."""
    if not any(_file_of(package, "") for package in _MLX_ON_CUDA):
        return None
    library = _file_of(_PACKAGE, _LIBRARY)
    if library is None or not runs(_MIMALLOC_PROBE, {"LD_PRELOAD": library}):
        logger.warning("no usable mimalloc found: pip install %s, for shorter steps", _PACKAGE)
        return None
    logger.debug("preloading %s into the engine", library)
    return library


def _file_of(package: str, name: str) -> str | None:
    """A file of an installed package; None if it is not installed."""
    try:
        return str(distribution(package).locate_file(name))
    except PackageNotFoundError:
        return None


def runs(program: str, environment: Mapping[str, str]) -> bool:
    """Whether Python runs `program` to its end in time, with `environment` added to ours."""
    arguments = ["-I", "-S", "-c", program]
    return launch.exit_status(arguments, {**os.environ, **environment}, _SECONDS) == 0
