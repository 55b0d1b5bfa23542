"""What the files of a checkpoint say of it, by their names and its `config.json`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"
_READ = (".json", ".jinja", ".model", ".txt", ".tiktoken", WEIGHTS)
"""The endings of the files that mlx-vlm and transformers read. No code: it is never run."""
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")


def is_read(path: str) -> bool:
    """Whether the loader reads the file at `path` of a repository: in its root alone.

    `consolidated` weights are a second copy, in Mistral's format.
    """
    if "/" in path or path.startswith("."):
        return False
    return path.endswith(_READ) and not path.startswith("consolidated")


def shards(index: Mapping[str, Any]) -> frozenset[str]:
    """The files of weights that an index names."""
    weight_map = index.get("weight_map")
    return frozenset(map(str, weight_map.values())) if isinstance(weight_map, dict) else frozenset()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_complete(folder: Path) -> bool:
    """Whether configuration and weights are all there, as far as their names tell."""
    if not os.path.isfile(folder / CONFIG):
        return False
    found = {path.name for path in weight_files(folder)}
    wanted = set(shards(read_object(folder / INDEX)))
    for name in found:
        if match := _SHARD.fullmatch(name):
            wanted |= {
                f"{match[1]}-{number:05}-of-{match[2]}.safetensors"
                for number in range(1, int(match[2]) + 1)
            }
    return bool(found) and all((folder / name).is_file() for name in wanted)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder; not macOS's `._*`, which hold attributes of others."""
    try:
        names = sorted(path for path in folder.iterdir() if path.name.endswith(WEIGHTS))
    except OSError:
        return []
    return [path for path in names if not path.name.startswith(".") and path.is_file()]


def stored_bytes(folder: Path) -> int:
    """Of the files of weights that the loader reads: those that the index names, else all."""
    named = shards(read_object(folder / INDEX))
    files = [path for path in weight_files(folder) if is_read(path.name)]
    return sum(path.stat().st_size for path in files if not named or path.name in named)


def family(config: Mapping[str, Any]) -> str:
    """The `model_type`; empty if there is none."""
    return str(config.get("model_type") or "")


def quantization(config: Mapping[str, Any]) -> str:
    """How the weights are stored: `4bit`, `awq`; their data type if they are not quantized."""
    for key in ("quantization", "quantization_config"):
        found = config.get(key)
        if isinstance(found, dict):
            if method := found.get("quant_method"):
                return str(method)
            if bits := found.get("bits"):
                return f"{bits}bit"
    text = config.get("text_config")
    sources = (config, text if isinstance(text, dict) else {})
    dtypes = (source.get(key) for source in sources for key in ("dtype", "torch_dtype"))
    return str(next((dtype for dtype in dtypes if dtype), ""))


def sees(config: Mapping[str, Any]) -> bool:
    """Whether the configuration speaks of images at all, in any family's words."""
    words = ("vision", "visual", "image", "img", "media", "mm_", "sam_", "clip")
    inner = [part for part in config.values() if isinstance(part, dict)]
    return any(word in key for part in (config, *inner) for key in part for word in words)
