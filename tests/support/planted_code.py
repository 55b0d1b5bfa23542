"""Code that tests plant in checkpoints, to see whether it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Planted:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (open, (str(self.mark), "w"))
