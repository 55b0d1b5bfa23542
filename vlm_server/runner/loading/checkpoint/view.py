"""The view of a checkpoint for mlx-vlm: our `config.json`, renamed weights, and no code.

mlx-vlm and transformers read a folder. They are told not to run code from it, but some of their
classes ignore that. Python calls audit hooks before it runs code, and ours raises if any code gets
past all flags.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_vlm.utils import get_model_and_args
from transformers.utils import HF_MODULES_CACHE

from vlm_server.errors import ModelLoadError
from vlm_server.hub.layout import is_adapters, visible_files
from vlm_server.runner.families.table import row_of

_guarded: set[str] = set()
"""Folders whose code may not run: checkpoints, and transformers' copies of their modules."""
_num_loading = 0
_is_installed = False


@contextmanager
def view_of(folder: Path, config: dict[str, Any]) -> Iterator[Path]:
    """A folder of links to what `folder` holds but adapters, with `config` as its config.json.

    Removed after the `with` block: lazy weights must be read by then.
    """
    with TemporaryDirectory(prefix="vlm-server-model-") as folder_name:
        view = Path(folder_name)
        for path in visible_files(folder):
            if path.name != "config.json" and not is_adapters(path.name):
                (view / path.name).symlink_to(path.absolute())
        (view / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield view


@contextmanager
def weights_renamed(config: dict[str, Any], prefixes: Mapping[str, str]) -> Iterator[None]:
    """mlx-vlm's names for the weights of `config`, whose prefixes are those of transformers 4.52.

    mlx-vlm renames weights in the model's `sanitize` alone, which is replaced in the `with` block,
    for loads of this thread; without `prefixes` it stays.
    """
    if not prefixes:
        yield
        return
    model: Any = get_model_and_args(config)[0].Model
    original = model.__dict__.get("sanitize")
    inner = getattr(model, "sanitize", None)

    def sanitize(self: Any, weights: Mapping[str, Any]) -> Any:
        renamed = {_rename(name, prefixes): array for name, array in weights.items()}
        return inner(self, renamed) if inner else renamed

    model.sanitize = sanitize
    try:
        yield
    finally:
        if original is None:
            del model.sanitize
        else:
            model.sanitize = original


@contextmanager
def text_model_of(config: dict[str, Any]) -> Iterator[None]:
    """The language model that `text_config` names in mlx-vlm's class for `config`, where that has
    another (`Family.other_texts`). Meant for threads that load nothing else in the `with` block."""
    row = row_of(config)
    name = (config.get("text_config") or {}).get("model_type")
    if row is None or name not in row.other_texts:
        yield
        return
    package, _ = get_model_and_args(config)
    module: Any = sys.modules[package.Model.__module__]
    text = f"mlx_vlm.models.{name}"
    originals = module.LanguageModel, package.TextConfig
    package.LanguageModel = module.LanguageModel = import_module(f"{text}.language").LanguageModel
    package.TextConfig = import_module(text).ModelConfig
    try:
        yield
    finally:
        module.LanguageModel, package.TextConfig = originals
        package.LanguageModel = module.LanguageModel


def _rename(name: str, prefixes: Mapping[str, str]) -> str:
    prefix = next((old for old in prefixes if name.startswith(old)), None)
    return name if prefix is None else prefixes[prefix] + name[len(prefix) :]


@contextmanager
def no_code_of(folder: Path) -> Iterator[None]:
    """No unpickling during the `with` block, and no code from `folder` from now on.

    Attempts raise ModelLoadError. Meant for threads that load nothing else in the block.
    """
    global _num_loading, _is_installed
    _guarded.update(_spellings(folder) | _spellings(Path(HF_MODULES_CACHE)))
    if not _is_installed:
        sys.addaudithook(_hook)  # audit hooks can't be removed
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
