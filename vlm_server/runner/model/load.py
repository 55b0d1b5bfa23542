"""Loads a checkpoint and says what the rest needs to know of it. Knows mlx-vlm's loader."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import tokenizers
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import get_model_type

from vlm_server.errors import ModelLoadError
from vlm_server.prompt.positions import forget_positions
from vlm_server.runner.model.checkpoint import check_files, check_shards, read_json, reason_of
from vlm_server.runner.model.evaluate import evaluate
from vlm_server.runner.model.families import CHECKED, WITH_VIDEO
from vlm_server.runner.model.fingerprint import fingerprint
from vlm_server.runner.model.processors import mend
from vlm_server.runner.rope import is_cpu
from vlm_server.runner.text.lm_head import use_last_token_head
from vlm_server.runner.text.mrope import use_shared_mrope
from vlm_server.runner.vision.patches import use_fast_patches
from vlm_server.runner.vision.towers import use_fast_tower
from vlm_server.settings import Model as ModelSettings

logger = logging.getLogger(__name__)

_RUNS_CODE = frozenset({"got", "inkling", "moondream2"})
"""Families whose processors in mlx-vlm trust the checkpoint's code, whatever the caller says."""
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, its processor, and the facts read from its files.

    `video_token_id` is None for a family whose videos are shown as pictures, frame by frame.
    `vocabulary_size` is the width of its logits; the tokenizer may know fewer tokens, or more.
    `fingerprint` names all that a picture's features follow from, but for the picture.
    """

    model: Any
    processor: Any
    model_type: str
    image_token_id: int
    video_token_id: int | None
    eos_token_ids: frozenset[int]
    context_tokens: int
    vocabulary_size: int
    default_temperature: float
    default_top_p: float
    fingerprint: str

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer around `backend`."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        backend: tokenizers.Tokenizer = self.tokenizer.backend_tokenizer
        return backend

    @property
    def language_model(self) -> Any:
        return self.model.language_model


def load(settings: ModelSettings) -> LoadedModel:
    """The checkpoint in folder `settings.path`. Runs no code from it and fetches nothing.

    Raises ModelLoadError if the folder is no checkpoint that can be served.
    """
    folder = Path(settings.path)
    config = _read_config(folder)
    _refuse_unsafe(config)
    try:
        model, processor = mlx_vlm.load(str(folder), lazy=True, trust_remote_code=False)
    except Exception as error:
        logger.debug("loading failed", exc_info=True)
        check_shards(folder)
        raise ModelLoadError(f"mlx-vlm can't load this checkpoint: {reason_of(error)}") from error
    _warn_of_unchecked(str(config["model_type"]))
    mend(processor)
    _set_dtype(model, settings.dtype)
    use_fast_tower(model)
    use_fast_patches(processor, model)
    use_last_token_head(model.language_model)
    use_shared_mrope(model.language_model, has_rope_kernel=not is_cpu())
    evaluate(model)
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelLoadError("the checkpoint has no fast tokenizer (tokenizer.json)")
    generation = read_json(folder / "generation_config.json")
    return LoadedModel(
        model=model,
        processor=processor,
        model_type=str(config["model_type"]),
        image_token_id=_image_token_id(model, config),
        video_token_id=_video_token_id(model, config),
        eos_token_ids=_eos_token_ids(config, generation, tokenizer),
        context_tokens=_context_tokens(config, settings.max_context_tokens),
        vocabulary_size=_vocabulary_size(model.language_model),
        default_temperature=_default_temperature(generation),
        default_top_p=float(generation.get("top_p") or 1.0),
        fingerprint=fingerprint(folder, str(settings.dtype)),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    check_files(folder)
    config = read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{folder}/config.json names no model_type")
    return config


def _refuse_unsafe(config: dict[str, Any]) -> None:
    if "model_file" in config:
        raise ModelLoadError("config.json has `model_file`, code to be run from the checkpoint")
    if get_model_type(config) in _RUNS_CODE:
        raise ModelLoadError(f"mlx-vlm runs code from checkpoints of {config['model_type']}")
    if config.get("is_encoder_decoder") or config["model_type"] == "florence2":
        raise ModelLoadError(f"{config['model_type']} is an encoder-decoder model")


def _warn_of_unchecked(model_type: str) -> None:
    if model_type not in CHECKED:
        logger.warning(
            "%s is not one of the families that are checked (docs/families.md): its answers may "
            "be wrong where prompts are chunked or requests batched",
            model_type,
        )


def _set_dtype(model: Any, name: str) -> None:
    """Cast floating-point weights; MLX's CPU is fast in float32 alone."""
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    if name == "auto" and is_cpu:
        name = "float32"
    if name != "auto":
        model.set_dtype(_DTYPES[name])


def _image_token_id(model: Any, config: dict[str, Any]) -> int:
    token_id = _named(model, config, "image_token_index", "image_token_id")
    if token_id is None:
        raise ModelLoadError(f"{config['model_type']} names no image token: not a vision model")
    return token_id


def _video_token_id(model: Any, config: dict[str, Any]) -> int | None:
    if config["model_type"] not in WITH_VIDEO:
        return None
    return _named(model, config, "video_token_index", "video_token_id")


def _named(model: Any, config: dict[str, Any], *names: str) -> int | None:
    """The first of `names` in the model's configuration that is a number."""
    sources = (vars(model.config), config)
    found = (source.get(name) for source in sources for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _eos_token_ids(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: Any
) -> frozenset[int]:
    text = config.get("text_config") or {}
    found: set[int] = set()
    for source in (generation, config, text, {"eos_token_id": tokenizer.eos_token_id}):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def _context_tokens(config: dict[str, Any], limit: int) -> int:
    text = config.get("text_config") or config.get("llm_config") or {}
    own = text.get("max_position_embeddings") or config.get("max_position_embeddings") or 32768
    return min(int(own), limit) if limit else int(own)


def _vocabulary_size(language_model: Any) -> int:
    """The width of the logits, from a step that is planned but never computed.

    Configurations name it in as many ways as there are families, and not all of them truly.
    """
    token_ids = mx.zeros((1, 1), dtype=mx.int32)
    output = language_model(token_ids, cache=make_prompt_cache(language_model))
    forget_positions(language_model)
    return int(output.logits.shape[-1])


def _default_temperature(generation: dict[str, Any]) -> float:
    """The checkpoint's own way to decode: greedy if it says so, else its temperature."""
    if generation.get("do_sample") is False:
        return 0.0
    temperature = generation.get("temperature")
    return 1.0 if temperature is None else float(temperature)
