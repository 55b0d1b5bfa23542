"""Tiny random checkpoints that `mlx_vlm.load` reads offline, of vision-language and text models."""

from __future__ import annotations

import contextlib
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_vlm.convert import convert

from tests.tiny_models import (
    any_size,
    crops,
    gemma,
    gemma4,
    glm,
    grids,
    harmony,
    idefics,
    llava,
    qwen,
    tiles,
)
from tests.tiny_models.checkpoint import Family, definition_key, write
from tests.tiny_models.embedders import EMBEDDERS, JUDGES, RERANKERS
from tests.tiny_models.texts import TEXTS

_VISION_LANGUAGE: dict[str, Family] = {
    "qwen2_5_vl": qwen.QWEN2_5_VL,
    "qwen3_vl": qwen.QWEN3_VL,
    "qwen3_5": qwen.QWEN3_5,
    "gemma3": gemma.GEMMA3,
    "gemma4": gemma4.GEMMA4,
    "smolvlm": idefics.SMOLVLM,
    "qwen2_vl": qwen.QWEN2_VL,
    "qwen3_vl_moe": qwen.QWEN3_VL_MOE,
    "idefics3": idefics.IDEFICS3,
    "pixtral": any_size.PIXTRAL,
    "mistral3": any_size.MISTRAL3,
    "internvl": tiles.INTERNVL,
    "glm4v": glm.GLM4V,
    "glm4v_moe": glm.GLM4V_MOE,
    "aya_vision": tiles.AYA_VISION,
    "llava": llava.LLAVA,
    "idefics2": idefics.IDEFICS2,
    "paligemma": gemma.PALIGEMMA,
    "minicpmo": any_size.MINICPMO,
    "molmo": crops.MOLMO,
    "molmo2": crops.MOLMO2,
    "llama4": tiles.LLAMA4,
    "llava_next": llava.LLAVA_NEXT,
    "llava_onevision": llava.LLAVA_ONEVISION,
    "qwen3_5_moe": qwen.QWEN3_5_MOE,
    "gemma3n": gemma.GEMMA3N,
    "fastvlm": llava.FASTVLM,
    "qwen3_omni_moe": qwen.QWEN3_OMNI_MOE,
    "granite4_vision": llava.GRANITE4_VISION,
    "lfm2_vl": tiles.LFM2_VL,
    "paddleocr_vl": grids.PADDLEOCR_VL,
    "internvl_chat": tiles.INTERNVL_CHAT,
    "kimi_vl": grids.KIMI_VL,
    "kimi_k25": grids.KIMI_K25,
    "gemma4_unified": gemma4.GEMMA4_UNIFIED,
    "step3p7": tiles.STEP3P7,
    "dots_ocr": grids.DOTS_OCR,
    "glm_ocr": glm.GLM_OCR,
    "glm5_next": grids.GLM5_NEXT,
    "jina_vlm": crops.JINA_VLM,
    "nemotron_h_nano_omni": grids.NEMOTRON_OMNI,
}
_SHAPES: dict[str, dict[str, Family]] = {
    "tiny": _VISION_LANGUAGE | TEXTS | EMBEDDERS | RERANKERS | JUDGES,
    "mid": {"qwen2_5_vl": qwen.QWEN2_5_VL_MID},
    "harmony": {"gpt_oss": harmony.GPT_OSS},
    "over qwen2": {"internvl": tiles.INTERNVL_QWEN2},
    "agent": {"qwen2_5_vl": qwen.QWEN2_5_VL_AGENT},
}
ONE_IMAGE = ("granite4_vision", "jina_vlm", "llava_next", "paligemma", "paddleocr_vl", "step3p7")
"""Families that mlx-vlm can show one image only, or images of one size, by its processor or its
model."""
LARGE = ("gemma3n", "granite4_vision", "paddleocr_vl")
"""Families of which a width stands in mlx-vlm's code."""
LONG_IMAGES = ("step3p7",)
"""Families of which the number of an image's tokens stands in mlx-vlm's code."""
FIXED = ("llama4_text",)
"""Text families that mlx-vlm can't answer without our correction."""
WHOLE_PROMPTS = ("phi", "phixtral", "qwen", "recurrent_gemma", "stablelm")
"""Families that mlx-vlm's `generate` answers with `prefill_step_size=None` only.

It hands a part of a prompt on as `inputs`, and theirs is named otherwise.
"""
GROUP_SIZE = 32
"""The smallest that MLX has: the vision towers are 32 wide."""
CACHE = Path(__file__).parents[2] / ".cache" / "tiny_models"
SHAPES: tuple[str, ...] = tuple(_SHAPES)
FAMILIES: tuple[str, ...] = tuple(_VISION_LANGUAGE)
TEXT_FAMILIES: tuple[str, ...] = tuple(TEXTS)
EMBEDDING_FAMILIES: tuple[str, ...] = tuple(EMBEDDERS)
RERANKING_FAMILIES: tuple[str, ...] = tuple(RERANKERS)
JUDGING_FAMILIES: tuple[str, ...] = tuple(JUDGES)


def definition(family: str, shape: str = "tiny") -> Family:
    """The checkpoint that `make` builds for `family`; KeyError for an unknown family."""
    return _SHAPES[shape][family]


def make(
    family: str, folder: Path, seed: int = 0, shape: str = "tiny", bits: int | None = None
) -> Path:
    """Write a checkpoint of `family` into `folder` and return it; KeyError for a stranger.

    With `bits`, 4 or 8, its weights are quantized as mlx-vlm does it.
    """
    if bits is None:
        return write(_SHAPES[shape][family], Path(folder), seed)
    with TemporaryDirectory() as whole:
        write(_SHAPES[shape][family], Path(whole), seed)
        convert(whole, str(folder), quantize=True, q_bits=bits, q_group_size=GROUP_SIZE)
    return Path(folder)


@cache
def cached(family: str, shape: str = "tiny", bits: int | None = None) -> Path:
    """A checkpoint that all runs in this clone share: made once, and read only."""
    key = definition_key(_SHAPES[shape][family], bits, GROUP_SIZE)
    kept = CACHE / f"{family}-{key}"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=CACHE) as parent:
            made = make(family, Path(parent, "model"), shape=shape, bits=bits)
            with contextlib.suppress(OSError):  # another process was first
                made.rename(kept)
    return kept


def build(family: str, folder: Path, shape: str = "tiny", bits: int | None = None) -> Path:
    """Copy the cached checkpoint into `folder`, to be changed there; returns it."""
    return Path(shutil.copytree(cached(family, shape, bits), folder, dirs_exist_ok=True))
