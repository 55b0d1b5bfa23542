"""The start of an engine process: its `Start` command, and its additional environment."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from vlm_server.models import EMBEDDED
from vlm_server.platform import log_lines, preload
from vlm_server.platform.private_folder import LIBRARIES, PrivateFolder
from vlm_server.protocol import Start
from vlm_server.settings import AUTO, OFF, EngineSettings, Settings
from vlm_server.settings.paths import expand_home


def start_of(settings: Settings) -> Start:
    """The first command of an engine, with absolute paths; the embedded model if none is named."""
    path = Path(settings.model.path) if settings.model.path else EMBEDDED
    template, drafter = settings.model.chat_template, settings.model.drafter
    model = msgspec.structs.replace(
        settings.model,
        path=str(path.absolute()),
        chat_template=str(expand_home(template).absolute()) if template else "",
        drafter=drafter if drafter in (AUTO, OFF) else str(expand_home(drafter).absolute()),
    )
    return Start(
        model=model,
        scheduler=settings.scheduler,
        engine=settings.engine,
        memory=settings.memory,
        log=settings.log,
        image=settings.image,
        video=settings.video,
        cache=settings.cache,
        adapters=settings.adapters_of(settings.model.name),
    )


_FOR_MLX = {
    "MLX_CUDA_SDPA_CACHE_SIZE": "1024",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_USE_CUDA_GRAPHS": "0",
}
"""For CUDA: how many shapes of attention MLX keeps plans for, as its 256 are less than long prompts
need (`runner/backends/cuda/attention.py`); that it makes plans for any number of shapes, rather
than fail; and that it launches kernels one by one, which takes less time in steps with images.
See docs/decisions/0054."""


def for_any_server(private: PrivateFolder, *, with_openblas: bool) -> dict[str, str]:
    """The additional environment of any server that runs models here, mlx-vlm's too.

    Takes a while. Raises OSError if there is no room for a private folder.
    """
    libraries = private.path() / LIBRARIES
    openblas = preload.find_openblas(libraries) if with_openblas else {}
    return {**private.environment(), **openblas}


def for_models(private: PrivateFolder, settings: EngineSettings) -> dict[str, str]:
    """The additional environment of an engine, made anew for each start. Takes a while.

    Raises OSError if there is no room for a private folder.
    """
    environment = for_any_server(private, with_openblas=settings.openblas == "auto")
    given = _FOR_MLX | log_lines.LIBRARIES
    environment |= {name: os.environ.get(name, value) for name, value in given.items()}
    if settings.mimalloc == "auto" and (library := preload.find_mimalloc()):
        # Last, so that a heap in our own LD_PRELOAD comes first.
        libraries = environment.get("LD_PRELOAD") or os.environ.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{libraries}:{library}" if libraries else library
    return environment
