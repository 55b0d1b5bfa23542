"""Builds the `ModelSpec` of a loaded model: the facts that prompts need."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.utils import should_add_special_tokens
from tokenizers import AddedToken

from vlm_server.errors import ModelLoadError
from vlm_server.interfaces.model_spec import AskPositions, ChunkPolicy, ModelSpec, MRope, StandIn
from vlm_server.runner.families.family import Family, MRopeRule
from vlm_server.runner.kv.layers import can_batch, has_states, new_layers
from vlm_server.runner.loading.chat_templates import (
    ChosenTemplate,
    own_template,
    reasoning_format,
    template_in,
    template_of_checkpoint,
    tool_parser,
)
from vlm_server.runner.loading.checkpoint.files import read_json
from vlm_server.runner.loading.embedder import BARE, score_spec, vector_spec
from vlm_server.runner.loading.probe import ask_positions, chunk_policy, text_positions
from vlm_server.runner.loading.processors import ModelProcessor, pixel_rule
from vlm_server.runner.model.mrope import forget_positions
from vlm_server.settings import ModelSettings

logger = logging.getLogger(__name__)

Json = dict[str, Any]
_USABLE_NAME = "usable_context_tokens"
"""Tokens up to which a model is known to answer well, if it has more positions."""
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_context_length",
    "model_max_length",
    "block_size",
)
"""Names of the longest context in config.json."""


def model_spec(
    settings: ModelSettings, config: Json, family: Family, model: Any, processor: Any
) -> ModelSpec:
    """The spec of a loaded model. Raises ModelLoadError without a fast tokenizer, or for an unknown
    tool parser, or for a model that reads images without an image token."""
    folder = Path(settings.path)
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelLoadError("the checkpoint has no fast tokenizer (tokenizer.json)")
    image_token_id = None
    if family.reads_images:
        image_token_id = image_token_of(family, model, config, tokenizer)
    stand_in = None
    if family.image_text:
        stand_in = _stand_in(family, model, processor)
        image_token_id = stand_in.token_id
    video_token_id = _token_id(model, config, "video_token_id", "video_token_index")
    model_processor = ModelProcessor(processor, image_token_id, stand_in)
    placeholders = _image_placeholders(family, processor, tokenizer, image_token_id)
    template = ChosenTemplate()
    if family.embeds is not None and (family.embeds.template or not family.reads_images):
        template = ChosenTemplate(family.embeds.template or BARE)
    elif not family.writes_prompts:
        video = tokenizer.convert_ids_to_tokens(video_token_id) if family.takes_videos else None
        template = _template(settings, family, processor, model_processor, placeholders, video)
    layers = [] if family.embeds is not None else new_layers(model.language_model)
    reasoning = None if family.embeds else reasoning_format(template.text)
    end_tokens = (template.end_token or "", *(reasoning.end_tokens if reasoning else ()))
    return ModelSpec(
        family=family.name,
        tokenizer=tokenizer,
        backend=tokenizer.backend_tokenizer,
        image_token_id=image_token_id,
        video_token_id=video_token_id if family.takes_videos else None,
        eos_token_ids=_eos_token_ids(config, folder, tokenizer, end_tokens)
        | frozenset(getattr(processor, "additional_eos_token_ids", ())),
        context_tokens=context_tokens_of(config, settings.max_context_tokens, family),
        vocabulary_size=_vocabulary_size(family, model, config),
        adds_special_tokens=family.embeds is not None
        or should_add_special_tokens(family.name, processor),
        image_placeholders=placeholders,
        chat_template=template.text,
        template_variables=dict(tokenizer.special_tokens_map),
        write_prompt=model_processor.write_prompt,
        process_image=model_processor.image,
        process_video=model_processor.video,
        mrope=_mrope(family, model),
        chunk_policy=ChunkPolicy.NOWHERE if family.embeds else chunk_policy(model),
        frame_token_ids=tuple(tokenizer.convert_tokens_to_ids(list(family.frame_tokens))),
        has_states=has_states(layers),
        image_mark=family.image_mark,
        can_batch=can_batch(layers),
        tool_parser=None if family.embeds else tool_parser(template.text, settings.tool_parser),
        reasoning_format=reasoning,
        pixel_rule=pixel_rule(processor, family.grounding_tokens),
        stand_in=stand_in,
        warnings=(*template.warnings, *_warnings_of(layers)),
        vectors=vector_spec(family, model, folder),
        scores=score_spec(family, tokenizer),
    )


_ONE_AT_A_TIME = "mlx-vlm's caches of this family can't be batched: one request runs at a time"


def _warnings_of(layers: Sequence[Any]) -> tuple[str, ...]:
    if can_batch(layers):
        return ()
    logger.warning("%s", _ONE_AT_A_TIME)
    return (_ONE_AT_A_TIME,)


def image_token_of(family: Family, model: Any, config: Json, tokenizer: Any) -> int:
    """The id of the token that stands for an image. Raises ModelLoadError if there is none."""
    token_id = _token_id(model, config, "image_token_id", "image_token_index")
    if family.image_token:
        token_id = tokenizer.get_vocab().get(family.image_token)
    if token_id is None:
        raise ModelLoadError(f"{family.name} names no image token: not a vision model")
    return token_id


def _template(
    settings: ModelSettings,
    family: Family,
    processor: Any,
    model_processor: ModelProcessor,
    placeholders: Sequence[str],
    video: str | None,
) -> ChosenTemplate:
    if settings.chat_template:
        return template_in(settings.chat_template)
    if family.chat_template:
        return ChosenTemplate(family.chat_template)
    if (template := template_of_checkpoint(processor)) is not None:
        return ChosenTemplate(template)
    tokenizer = getattr(processor, "tokenizer", processor)
    image = next(filter(model_processor.expands, placeholders), next(iter(placeholders), None))
    chosen = own_template(image, video, tokenizer.get_vocab().keys())
    logger.warning("%s", *chosen.warnings)
    return chosen


def _mrope(family: Family, model: Any) -> MRope | AskPositions | None:
    match family.mrope:
        case None:
            return None
        case MRopeRule.ASK_MODEL:
            return ask_positions(model.language_model)
        case MRopeRule.IN_ORDER:
            return text_positions
        case rule:
            merge_size = int(model.config.vision_config.spatial_merge_size)
            return MRope(merge_size, splits_videos=rule is MRopeRule.SPLIT_VIDEOS)


def _stand_in(family: Family, model: Any, processor: Any) -> StandIn:
    """The stand-in for image tokens; counts an image's features by a lazy encode.

    Raises ModelLoadError if the model has no spare embedding for another token.
    """
    model_id = int(model.config.image_token_index)
    probe = ModelProcessor(processor, model_id)
    probe_result = probe.image(np.zeros((64, 64, 3), dtype=np.uint8), family.image_text)
    ids = mx.array([[model_id, 0]])  # some families can't embed a prompt without text
    arrays = {name: mx.array(array) for name, array in probe_result.inputs.items()}
    features = model.get_input_embeddings(ids, mask=mx.ones_like(ids), **arrays).inputs_embeds
    added = AddedToken(family.image_text.strip(), special=True, normalized=False)
    processor.tokenizer.add_tokens([added], special_tokens=True)
    token_id = int(processor.tokenizer.convert_tokens_to_ids(added.content))
    if token_id >= model.language_model.model.embed_tokens.weight.shape[0]:
        raise ModelLoadError(f"{family.name} has no embedding to spare for images")
    return StandIn(token_id, int(features.shape[1]) - 1, model_id)


def _image_placeholders(
    family: Family, processor: Any, tokenizer: Any, image_token_id: int | None
) -> tuple[str, ...]:
    if image_token_id is None:
        return ()
    names = (
        family.image_text,
        family.placeholder,
        getattr(processor, "boi_token", None),
        getattr(processor, "image_token", None),
        getattr(processor, "image_placeholder_token", None),
        getattr(tokenizer, "image_token", None),
        str(tokenizer.convert_ids_to_tokens(image_token_id)),
    )
    return tuple(name for name in names if isinstance(name, str) and name)


def _token_id(model: Any, config: Json, *names: str) -> int | None:
    """The first of `names` with a number, in config.json or else in mlx-vlm's defaults."""
    sources = (config, vars(model.config))
    token_ids = (source.get(name) for source in sources for name in names)
    return next((value for value in token_ids if isinstance(value, int)), None)


def _eos_token_ids(
    config: Json, folder: Path, tokenizer: Any, end_tokens: Sequence[str]
) -> frozenset[int]:
    """End-of-sequence tokens, and those of `end_tokens` that the tokenizer has.

    The language model's own configuration is used last: transformers 5 writes a family's default
    there, which may be an ordinary token of another vocabulary.
    """
    generation = read_json(folder / "generation_config.json")
    configured = _ids(generation) | _ids(config) or _ids(config.get("text_config") or {})
    vocabulary = tokenizer.get_vocab()
    tokenizer_ids = [tokenizer.eos_token_id, *map(vocabulary.get, end_tokens)]
    return frozenset(
        configured | {int(token_id) for token_id in tokenizer_ids if token_id is not None}
    )


def _ids(source: Json) -> set[int]:
    value = source.get("eos_token_id")
    return set(value) if isinstance(value, list) else set() if value is None else {value}


def context_tokens_of(config: Json, limit: int | None, family: Family | None = None) -> int:
    """Maximum tokens of prompt and answer: the configuration's, or `limit` if smaller.

    Without a `limit` it is what the model can use, if the configuration says so.
    """
    parts = (config.get("text_config") or config.get("llm_config") or {}, config)
    lengths = (part.get(name) for name in _CONTEXT_NAMES for part in parts)
    context_tokens = next(filter(None, lengths), 32768)
    if family is not None and family.embeds is not None:
        context_tokens -= family.embeds.first_position
    return min(int(context_tokens), limit or config.get(_USABLE_NAME, context_tokens))


def _vocabulary_size(family: Family, model: Any, config: Json) -> int:
    """The width of the logits, from a lazy step that is never computed.

    Each family's configuration names it differently, and some are wrong. A model without logits
    has no other source.
    """
    if family.embeds is not None:
        return int((config.get("text_config") or config).get("vocab_size") or config["vocab_size"])
    language_model = model.language_model
    token_ids = mx.zeros((1, 1), dtype=mx.int32)
    output = language_model(token_ids, cache=new_layers(language_model))
    forget_positions(language_model)
    return int(output.logits.shape[-1])
