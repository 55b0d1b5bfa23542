"""Says what a file or folder is that people take for a checkpoint, and what to serve instead.

Looks at names, at a config file and at the first bytes of a file; knows no library.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

_GGUF = b"GGUF"
_SAFETENSORS = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INSTEAD = (
    "serve the model's *.safetensors instead, as its makers or mlx-community publish them on "
    "huggingface.co"
)
_GGUF_IS = "GGUF, the format of llama.cpp, Ollama and LM Studio, which MLX does not run"
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
"""Ways to quantize that mlx-vlm does not read, by `quant_method` of config.json."""


def visible_files(folder: Path, pattern: str = "*") -> list[Path]:
    """What `folder` holds, sorted. Names that begin with a dot are none of a checkpoint's:
    macOS leaves `.DS_Store`, and `._*` beside each file of an external drive."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def fault_of(path: Path) -> str | None:
    """Why `path` is no checkpoint, with what to do, in one line; None if it may be one.

    Reads no more than the beginning of a file. Raises no error: who reads on meets it again.
    """
    try:
        return _fault_of_file(path) if path.is_file() else _fault_of_folder(path)
    except OSError:
        return None


def fault_of_quantization(config: dict[str, Any]) -> str | None:
    """Why weights that are quantized as `config`, of config.json, says can't be read, if so."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    found = next((each for place in places if (each := place.get("quantization_config"))), None)
    if not isinstance(found, dict) or "quantization" in config:
        return None
    name = _UNREADABLE.get(str(found.get("quant_method")).lower())
    if name is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        name = "bitsandbytes"
    if name is None:
        return None
    return (
        f"its weights are quantized with {name}, which mlx-vlm does not read: serve the original, "
        "or a checkpoint quantized for MLX (mlx-community on huggingface.co, or mlx_vlm.convert -q)"
    )


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
    base = _text_of(folder / "adapter_config.json", "base_model_name_or_path")
    fault = fault_of_names(_names(folder), base)
    return f"{folder} {fault}" if fault else None


def fault_of_names(names: Collection[str], base: str = "") -> str | None:
    """What files of these names are, in a folder or a repository, if they are another thing than a
    checkpoint; with what to do, as the predicate of a sentence. `base`: an adapter's model."""
    inner = {name for name in names if "/" not in name}
    if any(_is_weights(name) for name in inner):
        return None
    if "adapter_config.json" in inner:
        return (
            f"is an adapter (LoRA){f' of {base}' if base else ''}, not a whole model: merge it "
            "into that model (peft's merge_and_unload, or mlx_vlm's fuse) and serve what is saved"
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


def lack_of(names: Collection[str]) -> str | None:
    """What a checkpoint lacks that has files of these names, as the predicate of a sentence."""
    if "config.json" not in names:
        return "is no checkpoint: it has no config.json"
    if not any("/" not in name and _is_weights(name) for name in names):
        return "has no *.safetensors: the checkpoint is not complete"
    return None


def _is_weights(name: str) -> bool:
    """Whether a file holds a model's weights; an adapter's go by other names."""
    return name.endswith(_SAFETENSORS) and not name.startswith(("adapter", "."))


def _names(folder: Path) -> list[str]:
    """Also those in the folders of a folder, as LM Studio keeps them: publisher, then model."""
    found = [path for inner in ("*", "*/*", "*/*/*") for path in visible_files(folder, inner)]
    return [str(path.relative_to(folder)) for path in found]


def _text_of(file: Path, key: str) -> str:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    found = content.get(key) if isinstance(content, dict) else None
    return found[:100].replace("\n", " ") if isinstance(found, str) else ""
