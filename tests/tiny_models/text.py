"""The recipe that all text-only checkpoints share: their tokens, their template, their sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.tiny_models.checkpoint import Checkpoint, Family
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WINDOW = 32

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def text_family(architecture: str, style: Style | None = None, **config: Any) -> Family:
    """A family whose `config.json` is a plain text decoder's, with what `config` changes in it."""
    named = {"architectures": [architecture]} | config
    return Family(SPECIALS, partial(_describe, named, style or Style()))


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


def _describe(config: dict[str, Any], style: Style, vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=llama(len(vocabulary), tie_word_embeddings=style.tied_head) | config,
        template=TEMPLATE,
        eos=("<|im_end|>", "<|endoftext|>"),
        pad="<|endoftext|>",
        files={},
        style=style,
    )
