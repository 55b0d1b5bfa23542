"""Whether MLX can be loaded in this installation, without importing it.

On Linux, the package `mlx` comes without its library, which one of this project's extras `cpu`
and `cuda` brings. On macOS it has all that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from vlm_server.errors import ModelLoadError
from vlm_server.platform.child import launch

_WHAT_TO_INSTALL = (
    "install vlm-server[cpu], or vlm-server[cuda] for an NVIDIA GPU, in place of plain vlm-server"
)
_SECONDS = 60.0


def check() -> None:
    """Raises ModelLoadError if no model can run in this installation, and says what to install.

    Takes no time if MLX's library is where wheels have it, and otherwise that of an import. One
    that is there but can't be loaded is the engine's to tell, by `not_loaded`.
    """
    spec = find_spec("mlx")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    if not has_library(folders) and not _can_be_imported():
        raise ModelLoadError(f"MLX has no backend in this installation: {_WHAT_TO_INSTALL}")


def not_loaded(error: ImportError) -> str:
    """The message of an engine whose libraries can't be loaded, such as for want of a driver."""
    message = str(error)
    if "libcuda.so" in message:
        return (
            "this machine has no NVIDIA driver (libcuda.so.1): install one, or vlm-server[cpu] in "
            "place of vlm-server[cuda]"
        )
    if "mlx" in message or "libcu" in message or "libnv" in message:
        return f"MLX can't be loaded: {message}; {_WHAT_TO_INSTALL}"
    return f"a library can't be loaded: {message}; install vlm-server again"


def has_library(folders: Iterable[str]) -> bool:
    """Whether one of the `folders` that make up the package `mlx` has its library."""
    libraries = ("lib/libmlx.so", "lib/libmlx.dylib")
    return any((Path(folder) / name).exists() for folder in folders for name in libraries)


def _can_be_imported() -> bool:
    """Whether an MLX that was built otherwise, with its library elsewhere, can be imported."""
    program = ["-P", "-c", "import mlx.core"]
    status = launch.exit_status(program, launch.environment(with_preload=True), _SECONDS)
    return status in (0, None)  # None: nothing is known, and the engine will say
