"""Finds mimalloc to preload into the engine on CUDA.

There MLX makes and gives up thousands of small objects on the host for each step, in several
threads, and glibc's heap took a third of the time of launching. On a CPU the heap is where arrays
lie, too, and encodes would take longer: see docs/decisions/0055.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, distribution

from vlm_server.platform import preload

logger = logging.getLogger(__name__)

_PACKAGE = "cmeel-mimalloc"
_LIBRARY = "cmeel.prefix/lib/libmimalloc.so.3"
_MLX_ON_CUDA = ("mlx-cuda-13", "mlx-cuda-12")
_PROBE = "import ctypes; ctypes.CDLL(None).mi_version()"


def find_preload() -> str | None:
    """The library's file, if MLX is for CUDA here and a process starts with it."""
    if not any(_file_of(package, "") for package in _MLX_ON_CUDA):
        return None
    library = _file_of(_PACKAGE, _LIBRARY)
    if library is None or not preload.runs(_PROBE, {"LD_PRELOAD": library}):
        logger.warning("no usable mimalloc found: pip install %s, for shorter steps", _PACKAGE)
        return None
    logger.info("preloading %s into the engine", library)
    return library


def _file_of(package: str, name: str) -> str | None:
    """A file of an installed package; None if it is not installed."""
    try:
        return str(distribution(package).locate_file(name))
    except PackageNotFoundError:
        return None
