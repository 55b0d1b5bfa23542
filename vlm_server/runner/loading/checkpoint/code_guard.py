"""Refuses to run code from a checkpoint, whichever library is about to.

mlx-vlm and transformers are asked not to, but some of their classes do not listen. Python tells
audit hooks what it is about to run, so what gets past all flags ends here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import HF_MODULES_CACHE

from vlm_server.errors import ModelLoadError

_guarded: set[str] = set()
"""Folders from which nothing may run: checkpoints, and where transformers copies their modules."""
_num_loading = 0
_is_installed = False


@contextmanager
def no_code_of(folder: Path) -> Iterator[None]:
    """While this lasts nothing is unpickled, and from now on nothing in `folder` runs.

    What tries to meets ModelLoadError. For threads that load nothing else meanwhile.
    """
    global _num_loading, _is_installed
    _guarded.update(_spellings(folder) | _spellings(Path(HF_MODULES_CACHE)))
    if not _is_installed:
        sys.addaudithook(_hook)  # it can't be taken out again
        _is_installed = True
    _num_loading += 1
    try:
        yield
    finally:
        _num_loading -= 1


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "exec":
        _check_path(getattr(args[0], "co_filename", None))
    elif event == "import":
        _check_path(args[1])
    elif event == "ctypes.dlopen":
        _check_path(args[0])
    elif event == "pickle.find_class" and _num_loading:
        raise ModelLoadError(f"the checkpoint holds a pickle, which would run {args[0]}.{args[1]}")


def _check_path(path: object) -> None:
    if isinstance(path, str) and os.path.isabs(path) and path.startswith(tuple(_guarded)):
        raise ModelLoadError(f"{Path(path).name} is code of the checkpoint, which is not run")


def _spellings(folder: Path) -> set[str]:
    return {os.path.join(os.path.abspath(folder), ""), os.path.join(os.path.realpath(folder), "")}
