"""What the environment of a process that runs models adds to ours."""

from __future__ import annotations

import os

from vlm_server.platform import mimalloc, openblas
from vlm_server.platform.private_folder import LIBRARIES, PrivateFolder
from vlm_server.settings import Engine

_FOR_MLX = {
    "MLX_CUDA_SDPA_CACHE_SIZE": "1024",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_USE_CUDA_GRAPHS": "0",
}
"""For CUDA: how many shapes of attention MLX keeps plans for, as its 256 are less than long prompts
need (`runner/backends/cuda/attention.py`); that it makes plans for any number of shapes, rather
than fail; and that it launches kernels one by one, which takes less time in steps with pictures.
See docs/decisions/0054."""


def for_any_server(private: PrivateFolder, *, with_openblas: bool) -> dict[str, str]:
    """What the environment of any server adds that runs models here, mlx-vlm's too.

    Takes a while. Raises OSError if there is no room for a private folder.
    """
    preload = openblas.find_preload(private.path() / LIBRARIES) if with_openblas else {}
    return {**private.environment(), **preload}


def for_models(private: PrivateFolder, settings: Engine) -> dict[str, str]:
    """To be asked for before each start: what it names may have been removed. Takes a while.

    Raises OSError if there is no room for a private folder.
    """
    added = for_any_server(private, with_openblas=settings.openblas == "auto")
    added |= {name: os.environ.get(name, value) for name, value in _FOR_MLX.items()}
    if settings.mimalloc == "auto" and (library := mimalloc.find_preload()):
        # Last, so that another heap that somebody preloads comes first.
        others = added.get("LD_PRELOAD") or os.environ.get("LD_PRELOAD")
        added["LD_PRELOAD"] = f"{others}:{library}" if others else library
    return added
