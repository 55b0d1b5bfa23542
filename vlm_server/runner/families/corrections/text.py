"""Corrections of language models that read text alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.base import LanguageModelOutput
from mlx_vlm.models.gpt2.language import GPT2Model

from vlm_server.runner.families.corrections import Settings, override


def group_masks(model: Any, _processor: Any, _settings: Settings) -> None:
    """Gemma 2: give masks of several rows the axis of the groups of heads, which its own attention
    lacks: it can't compute a batch."""
    for layer in model.language_model.layers:
        if layer.self_attn.repeats > 1:
            layer.self_attn = _GroupedMask(layer.self_attn)


class _GroupedMask(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is not typed
    """Attention by groups of heads, called with a mask, (rows, 1, queries, keys)."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> Any:
        if mask is not None and mask.ndim == _ROWS_DIMENSIONS:
            mask = mx.expand_dims(mask, 1)
        return self.inner(x, mask, cache)


_ROWS_DIMENSIONS = 4


def scale_all_embeddings(model: Any, _processor: Any, _settings: Settings) -> None:
    """Granite, MiniCPM: scale the embeddings of an answer's tokens too, not just those of the
    prompt."""
    text = model.language_model.model
    kind = type(text)

    def call(self: Any, inputs: Any, *further: Any, inputs_embeds: Any = None) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(inputs)
        return kind.__call__(self, inputs, *further, inputs_embeds=inputs_embeds)

    override(text, __call__=call)


def count_positions_of_rows(model: Any, _processor: Any, _settings: Settings) -> None:
    """GPT-BigCode: positions of each row, as GPT-2 counts them; mlx-vlm counts those of one row."""
    override(model.language_model.transformer, __call__=GPT2Model.__call__)


def head_of_embeddings(model: Any, _processor: Any, _settings: Settings) -> None:
    """Llama 4's text model: logits by its embeddings, if they are its head; mlx-vlm's have no name,
    and no quantized embeddings."""
    if not model.language_model.tie_word_embeddings:
        return

    def call(self: Any, inputs: Any, cache: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        hidden = self.model(inputs, cache, inputs_embeds=inputs_embeds)
        return LanguageModelOutput(logits=self.model.embed_tokens.as_linear(hidden))

    override(model.language_model, __call__=call)


def use_static_rope(model: Any, _processor: Any, _settings: Settings) -> None:
    """InternLM 2 and 3: RoPE with the base of prompts within the context, which is all that is
    served. mlx-vlm's compares one position with the context's length, and fails for several
    rows."""
    for module in model.language_model.modules():
        rope = module.get("rope")
        if type(rope).__name__ == "DynamicNTKScalingRoPE":
            module.rope = nn.RoPE(  # type: ignore[attr-defined]
                rope.dims, rope.traditional, rope.original_base, rope.scale
            )


def remember_prompts(model: Any, _processor: Any, _settings: Settings) -> None:
    """LongCat: embeddings of n-grams follow a prompt's tokens, too. mlx-vlm forgets tokens that it
    gets as embeddings, so that an answer would begin as if nothing stood before it."""
    text = model.language_model.model
    kind, width = type(text), text.ngram_embeddings.n - 1

    def call(self: Any, input_ids: Any, inputs_embeds: Any = None, cache: Any = None) -> Any:
        if cache is not None:
            memory, rows = cache[0], len(input_ids)
            if memory[0] is None:
                memory[0] = mx.zeros((rows, width), mx.int64)  # as before a text's first token
            if inputs_embeds is not None:
                tokens = mx.concatenate([memory[0], input_ids.astype(mx.int64)], axis=1)
                memory[0] = tokens[:, tokens.shape[1] - width :]
        return kind.__call__(self, input_ids, inputs_embeds, cache)

    override(text, __call__=call)
