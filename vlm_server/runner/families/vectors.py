"""Rows of families that make vectors of pictures and texts, or scores of pairs."""

from __future__ import annotations

from dataclasses import replace

from vlm_server.runner.families.corrections.features import embed_apart
from vlm_server.runner.families.embedding import (
    Embedding,
    by_classifier,
    by_last_token,
    by_mean,
    by_model,
    by_projection,
    joined_template,
    page_template,
)
from vlm_server.runner.families.family import Family, MRopeRule, Spelling
from vlm_server.runner.families.vision_language import qwen
from vlm_server.runner.vision.tiles import Tiling
from vlm_server.runner.vision.towers import DeepstackTower, WindowTower

_COLQWEN = page_template(
    before="<|im_start|>user\\n",
    image="<|vision_start|><|image_pad|><|vision_end|>",
    after="<|im_end|><|endoftext|>",
    spare="<|endoftext|>",
)
_COLIDEFICS = page_template(
    before="<|im_start|>User:",
    image="<image>",
    after="<end_of_utterance>\\nAssistant:",
    spare="<end_of_utterance>",
)
EMBEDDING_ROWS = (
    replace(
        qwen("qwen3_vl_embedding", MRopeRule.SPLIT_VIDEOS, DeepstackTower),
        coordinates="",
        grounding_tokens=0,
        spelling=Spelling(vision_type="qwen3_vl"),
        embeds=Embedding(
            by_last_token, instruction="Represent the user's input.", processor="qwen3_vl"
        ),
    ),
    Family(
        "colqwen2_5",
        tower=WindowTower,
        spelling=Spelling(True, "qwen2_5_vl"),
        embeds=Embedding(
            by_projection("custom_text_proj"),
            is_multi=True,
            template=_COLQWEN,
            processor="qwen2_5_vl",
        ),
    ),
    Family(
        "colidefics3",
        tiling=Tiling(axis=1),
        embeds=Embedding(
            by_projection("linear"), is_multi=True, template=_COLIDEFICS, processor="idefics3"
        ),
    ),
    Family(
        "embedding_gemma2",
        fix=embed_apart,
        embeds=Embedding(by_mean, template=joined_template("<|image|>")),
    ),
    *(
        Family(name, reads_images=False, embeds=Embedding(by_model))
        for name in ("bert", "llama_bidirec", "modernbert")
    ),
    Family(
        "xlm_roberta",
        reads_images=False,
        embeds=Embedding(by_model, processor="xlm-roberta", first_position=2),
        aliases=("xlm-roberta",),
    ),
    *(
        Family(f"{name}_embedding", reads_images=False, embeds=Embedding(by_model, processor=text))
        for name, text in (
            ("gemma3", "gemma3_text"),
            ("lfm2", "lfm2"),
            ("ministral3", "ministral3"),
            ("qwen3", "qwen3"),
        )
    ),
    Family(
        "lfm2_colbert",
        reads_images=False,
        embeds=Embedding(by_model, is_multi=True, processor="lfm2", batches_lengths=False),
    ),
    *(
        Family(
            f"{name.replace('-', '_')}_reranker",
            reads_images=False,
            module=name.replace("-", "_"),
            embeds=Embedding(
                by_classifier,
                of_pairs=True,
                processor=name,
                first_position=2 if name == "xlm-roberta" else 0,
            ),
        )
        for name in ("bert", "modernbert", "xlm-roberta")
    ),
)
