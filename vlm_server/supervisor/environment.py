"""What the environment of a process that runs models adds to ours."""

from __future__ import annotations

import os

from vlm_server.supervisor.openblas import find_preload
from vlm_server.supervisor.private_folder import PrivateFolder

_FOR_MLX = {"MLX_CUDA_SDPA_CACHE_SIZE": "1024"}
"""On CUDA, how many shapes of attention MLX keeps plans for; its 256 are less than long prompts
need (`runner/cuda/attention.py`)."""


def for_models(private: PrivateFolder, *, with_openblas: bool) -> dict[str, str]:
    """To be asked for before each start: what it names may have been removed. Takes a while.

    Raises OSError if there is no room for a private folder.
    """
    preload = find_preload(private.path() / "fortran") if with_openblas else {}
    for_mlx = {name: os.environ.get(name, value) for name, value in _FOR_MLX.items()}
    return {**private.environment(), **preload, **for_mlx}
