"""A vision-language serving daemon for a person's own machine, on MLX and mlx-vlm."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    """That of the installed package, `0+unknown` where there is none: the tag it was built from."""
else:

    def __getattr__(name: str) -> str:
        """`__version__`, read when it is asked for: that takes longer than most imports of ours."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("vlm-server")
        except PackageNotFoundError:
            found = "0+unknown"
        globals()[name] = found
        return found
