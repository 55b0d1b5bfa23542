"""Finds an OpenBLAS to preload into the engine on Linux CPUs.

MLX's CPU wheel links a reference BLAS; a preloaded OpenBLAS makes float32 matrix products about
50 times faster. A library that loads may still crash on an instruction that this processor
lacks, so each candidate first multiplies two matrices in a child process.
"""

from __future__ import annotations

import logging
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from vlm_server.platform import preload

logger = logging.getLogger(__name__)

_PROBE = """
import ctypes
n = 64
a = (ctypes.c_float * (n * n))(*([0.5] * (n * n)))
c = (ctypes.c_float * (n * n))()
f = ctypes.c_float
ctypes.CDLL(None).cblas_sgemm(101, 111, 111, n, n, n, f(1), a, n, a, n, f(0), c, n)
raise SystemExit(0 if abs(c[n * n - 1] - n / 4) < 1e-3 else 1)
"""


def find_preload(links: Path) -> dict[str, str]:
    """Environment variables that preload a working OpenBLAS; empty if there is none.

    They may name the folder `links`, which nobody else may be able to write to.
    Libraries that `LD_PRELOAD` already names are loaded after it.
    """
    if platform.system() != "Linux":
        return {}
    for candidate in _candidates(links):
        environment = {name: _prepended(name, path) for name, path in candidate.items()}
        if _works(environment):
            logger.info("preloading %s into the engine", candidate["LD_PRELOAD"])
            return environment
    logger.warning("no usable OpenBLAS found: the model will run about 50 times slower on the CPU")
    return {}


def _prepended(name: str, path: str) -> str:
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


def _works(environment: dict[str, str]) -> bool:
    """Whether a child process with `environment` starts and multiplies correctly."""
    return preload.runs(_PROBE, environment)
