"""Writes the checkpoint folder that `mlx_vlm.load` reads: float16, one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.network import DemoModel
from demo_model.shape import (
    MAX_PIXELS,
    MERGE,
    MIN_PIXELS,
    PATCH,
    VIDEO_FPS,
    VIDEO_MAX_PIXELS,
    VIDEO_MIN_PIXELS,
    ModelShape,
)
from demo_model.tokenizer import CHAT_TEMPLATE

FLOAT16_SAFE = 60000.0
PATCH_WEIGHT = "vision_tower.patch_embed.proj.weight"


def model_config(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, Any]:
    text, vision = shape.text, shape.vision
    token = tokenizer.token_to_id
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "torch_dtype": "float16",
        "vocab_size": text.vocab,
        "tie_word_embeddings": True,
        "usable_context_tokens": text.usable_tokens,
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "eos_token_id": [token("<|im_end|>"), token("<|endoftext|>")],
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": text.vocab,
            "hidden_size": text.hidden,
            "intermediate_size": text.intermediate,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": text.head_dim,
            "rms_norm_eps": text.rms_eps,
            "rope_theta": text.rope_theta,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": list(text.mrope_section),
            },
            "max_position_embeddings": text.max_positions,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": vision.layers,
            "hidden_size": vision.hidden,
            "intermediate_size": vision.intermediate,
            "num_heads": vision.heads,
            "out_hidden_size": text.hidden,
            "patch_size": PATCH,
            "spatial_patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "in_channels": 3,
            "num_position_embeddings": vision.positions,
            "deepstack_visual_indexes": list(vision.deepstack),
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def processor_config(kind: str, minimum: int, maximum: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        f"{kind}_processor_type": (
            "Qwen2VLImageProcessorFast" if kind == "image" else "Qwen3VLVideoProcessor"
        ),
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": minimum, "longest_edge": maximum},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
    }
    if kind == "video":
        config |= {"fps": VIDEO_FPS, "min_frames": 4, "max_frames": 16}
    return config


def tokenizer_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen3VLProcessor",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.text.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def export_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict in mlx's layouts, as float16; raises on a value float16 can't hold."""
    weights = {}
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all() or tensor.abs().max() > FLOAT16_SAFE:
            raise ValueError(f"{name} does not fit float16")
        if name == PATCH_WEIGHT:
            tensor = tensor.permute(0, 2, 3, 4, 1)
        weights[name] = tensor.detach().to("cpu", torch.float16).contiguous()
    return weights


def import_weights(folder: Path, model: DemoModel) -> None:
    """Load an exported checkpoint back into the PyTorch model, whose vocabulary may be larger.

    What is added to it begins as the mean of what is there.
    """
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("embed_tokens.weight")]:
        known = weights[name].float()
        num_new = model.state_dict()[name].shape[0] - len(known)
        weights[name] = torch.cat([known, known.mean(0, keepdim=True).expand(num_new, -1)])
    weights[PATCH_WEIGHT] = weights[PATCH_WEIGHT].permute(0, 4, 1, 2, 3)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})


def export(folder: Path, model: DemoModel, shape: ModelShape, tok: Tokenizer) -> None:
    """Write every file of the checkpoint into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = export_weights(model.state_dict())
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "model.safetensors").chmod(0o644)
    tok.save(str(folder / "tokenizer.json"))
    eos = [tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")]
    files = {
        "config.json": model_config(shape, tok),
        "tokenizer_config.json": tokenizer_config(shape),
        "preprocessor_config.json": processor_config("image", MIN_PIXELS, MAX_PIXELS),
        "video_preprocessor_config.json": processor_config(
            "video", VIDEO_MIN_PIXELS, VIDEO_MAX_PIXELS
        ),
        "generation_config.json": {
            "eos_token_id": eos,
            "pad_token_id": eos[1],
            "do_sample": False,
            "temperature": 0.0,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
