"""Checks of a checkpoint's files, which load nothing; each fault is one line."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

from vlm_server.errors import ModelLoadError
from vlm_server.hub.layout import (
    INDEX,
    fault_of,
    fault_of_quantization,
    is_adapters,
    missing_files_of,
    shards,
    visible_files,
)

_HEADER_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_MAX_REASON_CHARACTERS = 300
_TOKENIZERS = ("tokenizer.json", "vocab.json")
_LACKS_KEY = re.compile(r"(\w+)\.__init__\(\) missing \d+ required positional arguments?: (.*)")


def check_files(folder: Path) -> None:
    """Raises ModelLoadError for a file that is missing, truncated or no JSON, and for a folder that
    is no checkpoint for MLX."""
    if fault := fault_of(folder):
        raise ModelLoadError(fault)
    if lack := missing_files_of([path.name for path in visible_files(folder) if path.is_file()]):
        raise ModelLoadError(f"{folder} {lack}")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelLoadError(
            f"{folder} has no tokenizer.json: the checkpoint is not complete; download it again"
        )
    for path in visible_files(folder, "*.json"):
        if not is_adapters(path.name):
            read_json(path)
    if fault := fault_of_quantization(read_json(folder / "config.json")):
        raise ModelLoadError(f"{folder}: {fault}")
    for path in visible_files(folder, "*.safetensors"):
        if not is_adapters(path.name):
            check_weights(path)
    for name in _shard_names(folder):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"the index of the weights names {name!r}, which is no shard")


def check_shards(folder: Path) -> None:
    """Raises ModelLoadError for missing weight files that the index names.

    Only for a checkpoint that fails to load: an index may be older than its weights.
    """
    for name in _shard_names(folder):
        if not (folder / name).is_file():
            raise ModelLoadError(f"{folder} has no {name}, which its index names")


def _shard_names(folder: Path) -> list[str]:
    return sorted(shards(read_json(folder / INDEX)))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none. Raises ModelLoadError if unreadable."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"can't read {path}: {error}") from None
    return content if isinstance(content, dict) else {}


def image_settings(folder: Path) -> dict[str, Any]:
    """Settings of the image processor; transformers 5 writes them into the processor's."""
    inner = read_json(folder / "processor_config.json").get("image_processor")
    return read_json(folder / "preprocessor_config.json") | (inner if inner else {})


def reason_of(error: Exception) -> str:
    """A loader's error on one line, shortened."""
    text = " ".join(str(error).split())
    if lacks := _LACKS_KEY.search(text):
        return f"config.json lacks {lacks[2]} ({lacks[1]})"
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    is_long = len(text) > _MAX_REASON_CHARACTERS
    return f"{text[:_MAX_REASON_CHARACTERS]}..." if is_long else text or type(error).__name__


def check_weights(path: Path) -> list[tuple[str, int]]:
    """The type and number of elements of each tensor in a safetensors file.

    Raises ModelLoadError if it is damaged. The format: a length of 8 bytes, a JSON header with each
    tensor's type, shape and offsets, the data.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_HEADER_BYTES)
            length = int.from_bytes(start, "little")
            header = file.read(length) if length <= size else b""
    except OSError as error:
        raise ModelLoadError(f"can't read {path}: {error.strerror}") from None
    if _LFS_POINTER.startswith(start) and start:
        raise ModelLoadError(f"{path} is a pointer of Git LFS: the weights were not fetched")
    if size < _HEADER_BYTES + length or len(start) < _HEADER_BYTES:
        raise ModelLoadError(f"{path} is cut short or no safetensors file: {size} bytes")
    try:
        entries = [entry for name, entry in json.loads(header).items() if name[:2] != "__"]
        ends = [entry["data_offsets"][1] for entry in entries]
        tensors = [(str(e["dtype"]), prod(int(side) for side in e["shape"])) for e in entries]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError):
        raise ModelLoadError(f"{path} is no safetensors file") from None
    num_bytes = _HEADER_BYTES + length + max(ends, default=0)
    if size < num_bytes:
        raise ModelLoadError(f"{path} is cut short: it has {size} of {num_bytes} bytes")
    return tensors
