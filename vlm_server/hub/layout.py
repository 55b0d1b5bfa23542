"""The files of a checkpoint: which are read, their contents, and their faults.

Reads names, JSON and the first bytes of a file; imports no library. `fault_of` recognizes files
that are often mistaken for a checkpoint, and says what to serve instead.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"
SENTENCE_MODULES = "modules.json"
"""The file by which Sentence Transformers recognizes an embedding model."""
POOLING, TOKEN_PROJECTION = "1_Pooling", "1_Dense"
"""Folders of such a model: the pooling of its tokens' states, or the layer that projects each."""
_MODULE_FOLDER = re.compile(r"[0-9]+_(Pooling|Dense)")
ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = re.compile(r"(.*_)?adapters\.safetensors|adapter_model.*\.safetensors")
"""Weights of adapters, and those that mlx-vlm's trainer saves at times: `0000100_adapters`."""
_READ = (".json", ".jinja", ".model", ".txt", ".tiktoken", WEIGHTS)
"""Endings of the files that mlx-vlm and transformers read. No code: it is never run."""
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_GGUF = b"GGUF"
_GGUF_IS = "GGUF, the format of llama.cpp, Ollama and LM Studio, which MLX does not run"
_INSTEAD = (
    "serve the model's *.safetensors instead, as its makers or mlx-community publish them on "
    "huggingface.co"
)
_UNREADABLE = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "bitnet": "BitNet",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "quanto": "Quanto",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Quantization methods that mlx-vlm does not read, by `quant_method` of config.json."""

# ---- which files there are ---------------------------------------------------------------


def visible_files(folder: Path, pattern: str = "*") -> list[Path]:
    """The entries of `folder`, sorted, except names that begin with a dot.

    Those are no part of a checkpoint: macOS leaves `.DS_Store`, and `._*` next to each file of an
    external drive.
    """
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def is_read(path: str) -> bool:
    """Whether the loader reads the file at `path` of a repository: in its root, mostly.

    Embedding models have some layers in folders. `consolidated` weights are a second copy, in
    Mistral's format. An adapter beside whole weights is not read.
    """
    folder, _, name = path.rpartition("/")
    if name.startswith(".") or is_adapters(name):
        return False
    if folder and not _MODULE_FOLDER.fullmatch(folder):
        return False
    path = name
    return path.endswith(_READ) and not path.startswith("consolidated")


def is_adapters(name: str) -> bool:
    """Whether a file is a LoRA adapter's: its configuration or weights, of mlx-vlm or PEFT."""
    return name == ADAPTER_CONFIG or _ADAPTER.fullmatch(name) is not None


def shards(index: Mapping[str, Any]) -> frozenset[str]:
    """The weight files that an index names."""
    weight_map = index.get("weight_map")
    return frozenset(map(str, weight_map.values())) if isinstance(weight_map, dict) else frozenset()


def weight_files(folder: Path) -> list[Path]:
    """All files with a model's weights in a folder; none if it can't be read."""
    try:
        paths = visible_files(folder, f"*{WEIGHTS}")
        return [path for path in paths if path.is_file() and not is_adapters(path.name)]
    except OSError:
        return []


def read_weight_files(folder: Path) -> list[Path]:
    """The weight files that the loader reads: those that the index names, else all."""
    shard_names, files = shards(read_object(folder / INDEX)), weight_files(folder)
    return [path for path in files if path.name in shard_names] or [
        path for path in files if is_read(path.name)
    ]


def stored_bytes(folder: Path) -> int:
    """Bytes of the weight files that the loader reads."""
    return sum(path.stat().st_size for path in read_weight_files(folder))


def is_complete(folder: Path) -> bool:
    """Whether configuration and weights are all there, as far as file names tell."""
    if not os.path.isfile(folder / CONFIG):
        return False
    file_names = {path.name for path in weight_files(folder)}
    shard_names = set(shards(read_object(folder / INDEX)))
    for name in file_names:
        if match := _SHARD.fullmatch(name):
            shard_names |= {
                f"{match[1]}-{number:05}-of-{match[2]}.safetensors"
                for number in range(1, int(match[2]) + 1)
            }
    return bool(file_names) and all((folder / name).is_file() for name in shard_names)


# ---- what the configuration says ---------------------------------------------------------


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def family(config: Mapping[str, Any]) -> str:
    """The `model_type`; empty if there is none."""
    return str(config.get("model_type") or "")


def quantization(config: Mapping[str, Any]) -> str:
    """How the weights are stored: `4bit`, `awq`; their data type if they are not quantized."""
    for key in ("quantization", "quantization_config"):
        description = config.get(key)
        if isinstance(description, dict):
            if method := description.get("quant_method"):
                return str(method)
            if bits := description.get("bits"):
                return f"{bits}bit"
    sources = (config, _text_config(config))
    dtypes = (source.get(key) for source in sources for key in ("dtype", "torch_dtype"))
    return str(next((dtype for dtype in dtypes if dtype), ""))


_OF_LANGUAGE_MODELS = (
    "vocab_size",
    "vision_config",
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
)
"""Names in configurations of models that write, at least one."""


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether the configuration describes a model that writes, whatever it reads."""
    return any(name in config for name in _OF_LANGUAGE_MODELS)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}


# ---- what is wrong -----------------------------------------------------------------------


def fault_of(path: Path) -> str | None:
    """Why `path` is no checkpoint and what to do, in one line; None if it may be one.

    Also None for an OSError, which the loader will raise again.
    """
    try:
        return _fault_of_file(path) if path.is_file() else _fault_of_folder(path)
    except OSError:
        return None


def fault_of_quantization(config: dict[str, Any]) -> str | None:
    """Why weights quantized as `config` (config.json) says can't be read; None if they can."""
    places = (config, _text_config(config))
    description = next(
        (config_part for place in places if (config_part := place.get("quantization_config"))), None
    )
    if not isinstance(description, dict) or "quantization" in config:
        return None
    name = _UNREADABLE.get(str(description.get("quant_method")).lower())
    if name is None and (description.get("load_in_4bit") or description.get("load_in_8bit")):
        name = "bitsandbytes"
    if name is None:
        return None
    return (
        f"its weights are quantized with {name}, which mlx-vlm does not read: serve the original, "
        "or a checkpoint quantized for MLX (mlx-community on huggingface.co, or mlx_vlm.convert -q)"
    )


def fault_of_names(names: Collection[str], base: str = "") -> str | None:
    """Why a folder or repository with these file names is no checkpoint, and what to do, as the
    predicate of a sentence; None if it may be one. base: the model of an adapter."""
    inner = {name for name in names if "/" not in name}
    if any(_is_weights(name) for name in inner):
        return None
    if ADAPTER_CONFIG in inner:
        return (
            f"is an adapter (LoRA){f' of {base}' if base else ''}, not a whole model: serve that, "
            "with [models.NAME] base and adapter in the settings (docs/models.md)"
        )
    if any(name.endswith(".gguf") for name in names):
        return f"holds a model as {_GGUF_IS}: {_INSTEAD}"
    if any(name.endswith(_PICKLES) for name in inner):
        return (
            "holds PyTorch's pickles, which can run code when they are read: save the model as "
            "*.safetensors (save_pretrained of transformers) and serve that"
        )
    if any(name.endswith(".onnx") or name.split("/")[0] == "onnx" for name in names):
        return f"holds a model for ONNX, which MLX does not run: {_INSTEAD}"
    if "model_index.json" in inner:
        return "is a pipeline of diffusers, which makes pictures and answers no questions"
    return None


def missing_files_of(names: Collection[str]) -> str | None:
    """The missing files of a checkpoint, as the predicate of a sentence; None if all are there."""
    if CONFIG not in names:
        return "is no checkpoint: it has no config.json; name the folder that has one"
    if not any("/" not in name and _is_weights(name) for name in names):
        return "has no *.safetensors: the checkpoint is not complete; download it again"
    return None


def _fault_of_file(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(len(_GGUF))
    if start == _GGUF:
        return f"{path} is {_GGUF_IS}: {_INSTEAD}"
    return f"{path} is a file: model.path is the folder of a checkpoint"


def _fault_of_folder(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    if (folder / "manifests").is_dir() and (folder / "blobs").is_dir():
        return f"{folder} is Ollama's store, of models in {_GGUF_IS}: {_INSTEAD}"
    base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    base = base[:100].replace("\n", " ") if isinstance(base, str) else ""
    # LM Studio keeps publisher/model/file: what lies two folders deeper counts too.
    paths = [path for depth in ("*", "*/*", "*/*/*") for path in visible_files(folder, depth)]
    fault = fault_of_names([str(path.relative_to(folder)) for path in paths], base)
    return f"{folder} {fault}" if fault else None


def _is_weights(name: str) -> bool:
    """Whether a file holds a model's weights; an adapter's go by other names."""
    return name.endswith(WEIGHTS) and not name.startswith(".") and not is_adapters(name)
