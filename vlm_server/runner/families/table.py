"""The table of families of mlx-vlm: one row for each `model_type`, looked up once, at load.

No module elsewhere names a family or asks a model what it can do. To add one: CONTRIBUTING.md. A
family without a row is refused, or probed (`probe.py`) and served with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_vlm.utils import get_model_and_args, get_model_type

from vlm_server.errors import ModelLoadError
from vlm_server.runner.families.family import Family
from vlm_server.runner.families.text import TEXT_ROWS
from vlm_server.runner.families.vectors import EMBEDDING_ROWS
from vlm_server.runner.families.vision_language import VISION_LANGUAGE_ROWS

FAMILIES = {
    name: family
    for family in (*VISION_LANGUAGE_ROWS, *TEXT_ROWS, *EMBEDDING_ROWS)
    for name in (family.name, *family.aliases)
}
WRITE_PROMPTS = frozenset({"hrm_text", "kimi_k3", "plamo2vl"})
"""Families without a row whose processors use no chat template."""
_RUNS_CODE = frozenset({"got", "inkling", "moondream2"})
"""Families whose processors in mlx-vlm run the code of a checkpoint, or of a repository on the hub,
even if told not to."""
_ENCODER_DECODERS = frozenset({"florence2"})
"""Encoder-decoders whose configuration does not say so itself."""
_BY_NUMBER = "mlx-vlm's processor names the places of images in a prompt by number"
_DROPS_LAST = "mlx-vlm's processor drops the last token of a prompt, which may be one of an image"
_WRITES_PROMPT = "mlx-vlm's processor writes the prompt itself, with one image at its beginning"
WRONG = {
    "afm7": "mlx-vlm's layers that reuse keys count the positions of one row",
    "deepseek_v4": "its answers differ with the chunks of a prompt",
    "deepseek_v41": "mlx-vlm's processor makes records with the places of images in a prompt",
    "deepseek_vl_v2": _DROPS_LAST,
    "deepseekocr": f"{_DROPS_LAST}, and has one image a prompt",
    "deepseekocr_2": f"{_DROPS_LAST}, and has one image a prompt",
    "ernie4_5_moe_vl": "mlx-vlm's generation never asks its experts for images",
    "hy_v4": "its answers differ in batches, and with the chunks of a prompt",
    "hunyuan_vl": "mlx-vlm gives an image its positions in the first chunk of a prompt alone, and "
    "all rows of a batch the positions of the first",
    "llada2_moe": "mlx-vlm has it generate by diffusion, and not token by token",
    "llama_nemotron_vl_embedding": "mlx-vlm has no processor of its images",
    "llava_bunny": "mlx-vlm's model shows one image a prompt",
    "minicpmv4_6": _BY_NUMBER,
    "minimax_m3_vl": "the blocks of keys that it attends to begin at a row's padding, so that its "
    "answers differ in batches",
    "mllama": "images enter by cross-attention, and not by the prompt's embeddings",
    "moondream3": _WRITES_PROMPT,
    "phi3small": "mlx-vlm writes its logits out of bounds",
    "phi3_v": "mlx-vlm's processor drops the token after each image",
    "siglip": "mlx-vlm has its half for texts, and none for images",
    "phi4mm": "one id stands for an image in its prompts, whatever the number of its features",
    "qwen4_exp": "mlx-vlm writes outside its mask of attention for a prompt of two tokens",
    "youtu_vl": "mlx-vlm has no processor of its images",
}
"""Families with wrong answers or vectors, and the reasons; refused even with `allow_unchecked`."""


def row_of(config: Mapping[str, Any]) -> Family | None:
    """The row of a configuration's `model_type`, or of the one that mlx-vlm takes it for."""
    name = config.get("model_type")
    return FAMILIES.get(str(name)) or FAMILIES.get(str(get_model_type(dict(config))))


def with_module(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the `model_type` of the module that mlx-vlm has for it."""
    row = row_of(config)
    return {**config, **({"model_type": row.module} if row and row.module else {})}


def refuse_unservable(config: dict[str, Any], *, allow_unchecked: bool) -> None:
    """Raises ModelLoadError for a configuration that runs code, has no causal language model, or
    is of a family that mlx-vlm lacks, or that is known to be wrong, or unchecked."""
    name = config["model_type"]
    if "model_file" in config:
        raise ModelLoadError("config.json has `model_file`, code to be run from the checkpoint")
    if get_model_type(config) in _RUNS_CODE:
        raise ModelLoadError(
            f"mlx-vlm's processor of {name} runs code of the checkpoint or of the hub"
        )
    if config.get("is_encoder_decoder") or name in _ENCODER_DECODERS:
        raise ModelLoadError(f"{name} is an encoder-decoder model")
    if reason := WRONG.get(str(get_model_type(config))):
        raise ModelLoadError(f"{name} is not served: {reason}")
    row = row_of(config)
    text = (config.get("text_config") or config.get("llm_config") or {}).get("model_type")
    if row and row.text_types and text and text not in row.text_types:
        raise ModelLoadError(
            f"{name} over {text} is not served: mlx-vlm has it only over "
            f"{' and '.join(row.text_types)} (docs/families.md)"
        )
    if row is not None:
        return
    _refuse_without_language_model(config)
    if allow_unchecked:
        return
    raise ModelLoadError(
        f"{name} is not one of the families that are checked (docs/families.md), so its answers "
        "may be wrong: --allow-unchecked (model.allow_unchecked) serves it anyway"
    )


def _refuse_without_language_model(config: dict[str, Any]) -> None:
    name = config["model_type"]
    try:
        package, _ = get_model_and_args(config)
    except Exception as error:  # noqa: BLE001  modules of families fail with any exception
        raise ModelLoadError(f"mlx-vlm has no family {name!r}: {error}") from None
    if not hasattr(getattr(package, "Model", None), "get_input_embeddings"):
        raise ModelLoadError(f"{name} is not served: mlx-vlm has no language model for it")
