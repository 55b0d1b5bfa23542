"""LoRA adapters of tiny models, written by mlx-vlm's trainer, and the same in PEFT's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx_vlm
import numpy as np
from mlx_vlm.trainer.core import save_adapter
from mlx_vlm.trainer.peft import LoRALinear, get_peft_model
from safetensors.numpy import load_file, save_file

CONFIG = "adapter_config.json"
MLX = "adapters.safetensors"
PEFT = "adapter_model.safetensors"
TARGETS = ("q_proj", "v_proj", "down_proj")


def write_adapter(
    base: Path, folder: Path, seed: int, targets: Sequence[str] = TARGETS, rank: int = 4
) -> Path:
    """A random adapter in `folder` as mlx-vlm saves it, strong enough to change answers."""
    model, _ = mlx_vlm.load(str(base))
    get_peft_model(model, list(targets), rank=rank, alpha=1.5 * rank, dropout=0.0, verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    save_adapter(model, folder / MLX)
    assert any(isinstance(module, LoRALinear) for module in model.modules())
    draw_weights(folder / MLX, seed)
    return folder


def draw_weights(file: Path, seed: int) -> None:
    """Random matrices in place of those of an adapter."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, array in sorted(load_file(file).items()):
        noise = rng.standard_normal(array.shape)
        tensors[name] = (noise / np.sqrt(array.shape[0])).astype(np.float32)
    save_file(tensors, file)


def as_peft(adapter: Path, folder: Path, **fields: Any) -> Path:
    """The adapter in PEFT's layout, with the names of transformers from 4.52 on."""
    scale = json.loads((adapter / CONFIG).read_text())["lora_parameters"]["scale"]
    tensors, rank = {}, 0
    for name, array in load_file(adapter / MLX).items():
        place = name.removeprefix("language_model.").removeprefix("model.")
        layer, _, side = place.rpartition(".")
        side = {"lora_a": "lora_A", "lora_b": "lora_B"}[side]
        name = f"base_model.model.model.language_model.{layer}.{side}.weight"
        tensors[name] = np.ascontiguousarray(array.T)
        rank = min(array.shape)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base",
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": list(TARGETS),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / PEFT)
    (folder / CONFIG).write_text(json.dumps(config | fields))
    return folder
