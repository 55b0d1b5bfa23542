"""Models that make vectors: of pictures and texts, or of texts alone.

Those that have a language model's `model_type` have the files of Sentence Transformers, too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.tiny_models import chatml, gemma4, idefics, qwen
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import decoder
from tests.tiny_models.text_dense import DENSE
from tests.tiny_models.text_recurrent import RECURRENT
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

DIMENSIONS = 24
"""Of models whose vectors are projections."""
_NO_HEAD = Style(writes=False)
_MODULES: Json = {"0": {"type": "sentence_transformers.models.Transformer"}}
PROMPTS = {"query": "Find what answers this: ", "document": "", "title": "Title: "}


def _described(family: Family, vocabulary: Vocabulary, **config: object) -> Checkpoint:
    """The checkpoint of `family` without a head, with further settings of `config`."""
    made = family.describe(vocabulary)
    return replace(made, config={**made.config, **config}, style=_NO_HEAD)


def _qwen3_vl_embedding(vocabulary: Vocabulary) -> Checkpoint:
    return _described(qwen.QWEN3_VL, vocabulary, model_type="qwen3_vl_embedding")


def _colqwen2_5(vocabulary: Vocabulary) -> Checkpoint:
    return _described(
        qwen.QWEN2_5_VL, vocabulary, model_type="colqwen2_5", embedding_dim=DIMENSIONS
    )


def _colidefics3(vocabulary: Vocabulary) -> Checkpoint:
    return _described(
        idefics.IDEFICS3, vocabulary, model_type="colidefics3", embedding_dim=DIMENSIONS
    )


def _embedding_gemma2(vocabulary: Vocabulary) -> Checkpoint:
    made = gemma4.GEMMA4.describe(vocabulary)
    text = decoder(
        "embedding_gemma2_text",
        vocab_size=len(vocabulary),
        head_dim=16,
        hidden_size_per_layer_input=32,
        embedding_dim=DIMENSIONS,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        per_layer_config={n: {"head_dim": 32, "num_key_value_heads": 1} for n in ("01", "03")},
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    )
    images: Json = {
        "patch_size": gemma4.PATCH_PIXELS,
        "max_soft_tokens": 70,
        "image_processor_type": "EmbeddingGemma2ImageProcessor",
    }
    processors: Json = {"processor_class": "EmbeddingGemma2Processor", "image_processor": images}
    return replace(
        made,
        config={**made.config, "model_type": "embedding_gemma2", "text_config": text},
        files={"processor_config.json": processors},
        style=_NO_HEAD,
    )


def _of_sentences(
    family: Family,
    module: str,
    vocabulary: Vocabulary,
    *,
    pooling: str = "",
    folders: dict[str, str] | None = None,
    **files: Json,
) -> Checkpoint:
    """The checkpoint of a language model as one that makes vectors by mlx-vlm's `module`."""
    made = _described(family, vocabulary)
    settings: dict[str, Json] = {
        "modules.json": _MODULES,
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
        **({"1_Pooling/config.json": {f"pooling_mode_{pooling}": True}} if pooling else {}),
        **files,
    }
    return replace(made, files=settings, module=module, folders=folders or {})


def _lfm2_colbert(vocabulary: Vocabulary) -> Checkpoint:
    made = _of_sentences(
        RECURRENT["lfm2"], "lfm2_colbert", vocabulary, folders={"projection.weight": "1_Dense"}
    )
    dense: Json = {"in_features": 64, "out_features": DIMENSIONS}
    return replace(
        made,
        config={**made.config, "embedding_dim": DIMENSIONS},
        files={**made.files, "1_Dense/config.json": dense},
    )


def _encoder(vocabulary: Vocabulary, config: dict[str, Any], module: str = "") -> Checkpoint:
    """A model whose tokens all attend to each other, as it is published."""
    shared: Json = {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }
    return Checkpoint(
        config={**shared, **config},
        template=chatml.chatml(""),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={},
        style=_NO_HEAD,
        module=module,
    )


def _reranker_family(model_type: str, architecture: str, *, types: bool = False) -> Family:
    """An encoder that scores pairs of texts; `types`: it is told which text a token is of."""
    described = {"model_type": model_type, "architectures": [architecture], "num_labels": 1}
    module = model_type.replace("-", "_")

    def describe(vocabulary: Vocabulary) -> Checkpoint:
        made = _encoder(vocabulary, described, module)
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
        return replace(
            made, model_class="SequenceClassificationModel", tokenizer={"model_input_names": names}
        )

    return Family(chatml.SPECIALS, describe)


def _judge_family(family: Family) -> Family:
    """A model that writes, and knows the tokens `yes` and `no`."""

    def describe(vocabulary: Vocabulary) -> Checkpoint:
        return replace(family.describe(vocabulary), style=_NO_HEAD)

    return replace(family, words=ANSWERS, describe=describe)


def _encoder_family(model_type: str, module: str = "", **config: Any) -> Family:
    described = {"model_type": model_type, **config}
    return Family(chatml.SPECIALS, partial(_encoder, config=described, module=module))


def _sentences(family: Family, module: str, **options: Any) -> Family:
    return replace(family, describe=lambda words: _of_sentences(family, module, words, **options))


ANSWERS = ("yes", "no")
RERANKERS: dict[str, Family] = {
    "bert_reranker": _reranker_family("bert", "BertForSequenceClassification", types=True),
    "modernbert_reranker": _reranker_family("modernbert", "ModernBertForSequenceClassification"),
    "xlm_roberta_reranker": _reranker_family("xlm-roberta", "XLMRobertaForSequenceClassification"),
}
JUDGES: dict[str, Family] = {
    "qwen3_vl_judge": _judge_family(qwen.QWEN3_VL),
    "qwen3_judge": _judge_family(DENSE["qwen3"]),
}
"""Models that write, and score documents by the tokens of their answer."""
EMBEDDERS: dict[str, Family] = {
    "qwen3_vl_embedding": Family(qwen.SPECIALS, _qwen3_vl_embedding),
    "colqwen2_5": Family(qwen.SPECIALS, _colqwen2_5),
    "colidefics3": Family(idefics.IDEFICS3.specials, _colidefics3, bos=idefics.BEGIN),
    "embedding_gemma2": Family(gemma4.SPECIALS, _embedding_gemma2, bos="<bos>"),
    "bert": _encoder_family("bert"),
    "modernbert": _encoder_family("modernbert", local_attention=16),
    "xlm_roberta": _encoder_family("xlm-roberta", "xlm_roberta"),
    "llama_bidirec": _encoder_family(
        "llama_bidirec", num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=1e5
    ),
    "qwen3_embedding": _sentences(DENSE["qwen3"], "qwen3_embedding", pooling="lasttoken"),
    "gemma3_embedding": _sentences(
        DENSE["gemma3_text"],
        "gemma3_embedding",
        pooling="mean_tokens",
        folders={"dense.0.weight": "2_Dense", "dense.1.weight": "3_Dense"},
    ),
    "lfm2_embedding": _sentences(RECURRENT["lfm2"], "lfm2_embedding", pooling="cls_token"),
    "lfm2_colbert": Family(RECURRENT["lfm2"].specials, _lfm2_colbert),
    "ministral3_embedding": _sentences(
        DENSE["ministral3"], "ministral3_embedding", pooling="mean_tokens"
    ),
}
