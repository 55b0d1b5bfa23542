"""The recipe that all text-only checkpoints share: their tokens, their template, their sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

WINDOW = 32
VOCABULARY = "vocab_size"
POSITIONS = "max_position_embeddings"


def text_family(
    architecture: str,
    style: Style | None = None,
    vocabulary: str = VOCABULARY,
    positions: str = POSITIONS,
    **config: Any,
) -> Family:
    """A family whose `config.json` is a plain text decoder's, with what `config` changes in it.

    `vocabulary`, `positions`: its names of the vocabulary's size and of the longest context.
    """
    changes = {"architectures": [architecture]} | config
    names = {VOCABULARY: vocabulary, POSITIONS: positions}
    return Family(chatml.SPECIALS, partial(_describe, changes, style or Style(), names))


def named(**families: Family) -> dict[str, Family]:
    """The families by their names, which are their `model_type` unless they have another."""
    return {
        name: replace(family, describe=partial(_with_type, name, family))
        for name, family in families.items()
    }


def _with_type(name: str, family: Family, vocabulary: Vocabulary) -> Checkpoint:
    made = family.describe(vocabulary)
    return replace(made, config={"model_type": name} | made.config)


def tied(**names: Any) -> Style:
    """The style of a model whose head is its embedding."""
    return Style(tied_head=True, **names)


def windows(count: int) -> dict[str, Any]:
    """Settings of `count` layers, of which each second sees everything, the others a window."""
    return {
        "num_hidden_layers": count,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (count // 2),
    }


def _describe(
    config: dict[str, Any], style: Style, names: dict[str, str], vocabulary: Vocabulary
) -> Checkpoint:
    plain = llama(tie_word_embeddings=style.tied_head)
    del plain["model_type"]
    size = dict.fromkeys((names[VOCABULARY], VOCABULARY), len(vocabulary))
    return Checkpoint(
        config={names.get(name, name): value for name, value in plain.items()} | size | config,
        template=chatml.chatml(""),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={},
        style=style,
    )
