"""Tiny random checkpoints of vision-language families, which `mlx_vlm.load` reads offline."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_models import gemma, glm, idefics, internvl, llava, mistral, qwen
from tests.tiny_models.checkpoint import Family, write

_SHAPES: dict[str, dict[str, Family]] = {
    "tiny": {
        "qwen2_5_vl": qwen.QWEN2_5_VL,
        "qwen3_vl": qwen.QWEN3_VL,
        "qwen3_5": qwen.QWEN3_5,
        "gemma3": gemma.GEMMA3,
        "smolvlm": idefics.SMOLVLM,
        "qwen2_vl": qwen.QWEN2_VL,
        "qwen3_vl_moe": qwen.QWEN3_VL_MOE,
        "idefics3": idefics.IDEFICS3,
        "pixtral": mistral.PIXTRAL,
        "mistral3": mistral.MISTRAL3,
        "internvl": internvl.INTERNVL,
        "glm4v": glm.GLM4V,
        "llava": llava.LLAVA,
    },
    "mid": {"qwen2_5_vl": qwen.QWEN2_5_VL_MID},
}
SHAPES: tuple[str, ...] = tuple(_SHAPES)
FAMILIES: tuple[str, ...] = tuple(_SHAPES["tiny"])


def build(family: str, folder: Path, seed: int = 0, shape: str = "tiny") -> Path:
    """Write a checkpoint of `family` into `folder` and return it; KeyError for a stranger."""
    return write(_SHAPES[shape][family], Path(folder), seed)
