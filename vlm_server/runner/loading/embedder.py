"""Loading of embedding models: mlx-vlm's module, the vectors' size, and the prompts of inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.encoder_loader import load_encoder_model
from mlx_vlm.models.pooling import read_pooling_config
from mlx_vlm.reranker_loader import load_sequence_classification_model
from mlx_vlm.utils import load_processor

from vlm_server.hub.layout import TOKEN_PROJECTION
from vlm_server.interfaces.model_spec import ScoreSpec, VectorSpec
from vlm_server.runner.families.embedding import EmbeddingBatch
from vlm_server.runner.families.family import Family
from vlm_server.runner.families.table import row_of, with_module
from vlm_server.runner.loaded import language_model_of
from vlm_server.runner.loading.checkpoint.files import read_json
from vlm_server.runner.model.deepstack import add_to_all_tokens
from vlm_server.runner.model.forward_pass import embed_text
from vlm_server.runner.model.mrope import DecodePositions, forget_positions, use_shared_mrope

BARE = "{%- for message in messages %}{{- message.content }}{%- endfor %}"
"""The template of models that read text alone: the text, after its prompt."""
_PROMPTS = "config_sentence_transformers.json"
_PROBE_TOKENS = 4
SYSTEM_PROMPT = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
"""The system's message to models that are asked for yes or no, of Qwen's rerankers."""


def load_embedder(view: Path, config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-vlm's model and processor of a checkpoint in `view`; the weights are lazy.

    config: its config.json, with the `model_type` that makes vectors.
    """
    row = row_of(config)
    if row is not None and row.embeds is not None and row.embeds.of_pairs:
        model = load_sequence_classification_model(view, lazy=True, config=with_module(config))
        return model, load_processor(view, add_detokenizer=False, trust_remote_code=False)
    projection = read_json(view / TOKEN_PROJECTION / "config.json").get("out_features")
    overrides = {} if projection is None else {"embedding_dim": projection}
    model = load_encoder_model(
        view, model_remapping={}, config=config, config_overrides=overrides, lazy=True
    )
    pooling = read_pooling_config(view)
    if pooling is not None:
        model.pooling_config = pooling
    return model, load_processor(view, add_detokenizer=False, trust_remote_code=False)


def make_embedder_fast(family: Family, model: Any) -> DecodePositions:
    """Replace parts of the language model, as for one that writes."""
    language_model = language_model_of(model)
    add_to_all_tokens(language_model)
    if family.mrope is None:
        return DecodePositions.NONE
    return use_shared_mrope(language_model)


def vector_spec(family: Family, model: Any, folder: Path) -> VectorSpec | None:
    """The vectors of a model that embeds, and its prompts; None for a model that writes."""
    embeds = family.embeds
    if embeds is None or embeds.of_pairs:
        return None
    settings = read_json(folder / _PROMPTS)
    stored = settings.get("prompts")
    prompts = {
        str(name): text
        for name, text in (stored.items() if isinstance(stored, dict) else ())
        if isinstance(text, str)
    }
    default = prompts.get(str(settings.get("default_prompt_name"))) or embeds.instruction
    dimensions = int(_probe(family, model).shape[-1])
    return VectorSpec(dimensions, embeds.is_multi, prompts, default)


def score_spec(family: Family, tokenizer: Any) -> ScoreSpec | None:
    """The way the model scores documents; None if it does not, or does so by its vectors."""
    if family.embeds is not None:
        has_types = "token_type_ids" in tokenizer.model_input_names
        return ScoreSpec(has_types=has_types) if family.embeds.of_pairs else None
    judges = family.judges
    answers = [_token_id(tokenizer, word) for word in ("yes", "no")]
    if judges is None or None in answers:
        return None
    yes, no = (int(answer or 0) for answer in answers)
    return ScoreSpec(
        (yes, no),
        system=SYSTEM_PROMPT,
        instruction=judges.instruction,
        before_instruction="<Instruct>: ",
        before_query=judges.before_query,
        before_document=judges.before_document,
    )


def _token_id(tokenizer: Any, word: str) -> int | None:
    """The id of the token for `word`; None if it is no token."""
    token_id = tokenizer.convert_tokens_to_ids(word)
    is_known = token_id is not None and token_id != tokenizer.unk_token_id
    return int(token_id) if is_known else None


def _probe(family: Family, model: Any) -> mx.array:
    """Vectors that are never computed, for their shape."""
    assert family.embeds is not None
    token_ids = mx.ones((1, _PROBE_TOKENS), dtype=mx.int32)
    arguments = dict[str, mx.array]()
    if family.reads_images:
        arguments = embed_text(model, token_ids)
        forget_positions(model.language_model)
        if family.mrope is not None:
            positions = mx.broadcast_to(mx.arange(_PROBE_TOKENS), (3, 1, _PROBE_TOKENS))
            arguments["position_ids"] = positions
    batch = EmbeddingBatch(token_ids, (_PROBE_TOKENS,), arguments)
    return family.embeds.embed(model, batch)
