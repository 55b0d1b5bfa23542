"""The functions to compile: mlx-vlm's forward pass, on KV buffers with bounds on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from vlm_server.runner.backends.bounded_layer import BoundedLayer, MixedLayer
from vlm_server.runner.device.arrays import read
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.lm_head import WantedLogits, logits_of

logger = logging.getLogger(__name__)

KVBuffers = list[tuple[mx.array, mx.array]]
"""Keys and values of each layer, (rows, heads, capacity, head size)."""
Embed = Callable[[mx.array], mx.array]
"""Token ids, (tokens,), to the input of the first layer."""


class ForwardPass:
    """Functions of arrays alone, to be compiled; `bounds` and `prompt_bounds`: see `BoundedLayer`.

    They raise the model's error if it reads values, and NotImplementedError if it does not attend
    by `scaled_dot_product_attention`.
    """

    def __init__(self, language_model: Any, attention: ModelAttention, embed: Embed | None) -> None:
        """`embed`: None if unknown; `run_mixed` needs it."""
        self._language_model = language_model
        self._attention = attention
        self._embed = embed
        self._in_place = attention.attention.appends_in_place

    def run(
        self,
        token_ids: mx.array,
        bounds: mx.array,
        buffers: KVBuffers,
        inputs: dict[str, mx.array],
        places: mx.array | None,
    ) -> tuple[mx.array, KVBuffers]:
        """Append `token_ids`, (rows, tokens).

        Returns logits, of each row's token at `places` or of all, and buffers not written in place.
        """
        layers = self._layers(buffers, bounds)
        wanted = WantedLogits(token_ids.shape[1], places=places)
        with logits_of(self._language_model, wanted):
            logits = self._call(token_ids, layers, inputs)
        return logits, self._new(layers)

    def run_mixed(
        self,
        token_ids: mx.array,
        bounds: mx.array,
        buffers: KVBuffers,
        position_ids: dict[str, mx.array],
        prompt_ids: mx.array,
        prompt_bounds: mx.array,
        prompt_buffers: KVBuffers,
        prompt_inputs: dict[str, mx.array],
        logit_rows: mx.array,
    ) -> tuple[mx.array, tuple[KVBuffers, KVBuffers]]:
        """Append a token to each row, (rows, 1), and `prompt_ids`, (1, tokens), to the prompt.

        To the model, each token is a row of its own. Returns the logits of `logit_rows` of these,
        and the buffers of both if they were not written in place.
        """
        assert self._embed is not None
        rows = self._layers(buffers, bounds)
        prompt = self._layers(prompt_buffers, prompt_bounds)
        count = prompt_ids.shape[1]
        layers = [MixedLayer(*both, count) for both in zip(rows, prompt, strict=True)]
        embeds = [self._embed(token_ids[:, 0]), prompt_inputs["inputs_embeds"][0]]
        inputs = {"inputs_embeds": mx.concatenate(embeds)[:, None]}
        if position_ids:
            mine, theirs = position_ids["position_ids"], prompt_inputs["position_ids"]
            if mine.ndim == 2:
                mine = mx.broadcast_to(mine[None], (3, *mine.shape))
            inputs["position_ids"] = mx.concatenate([mine, theirs.swapaxes(1, 2)], axis=1)
        ids = mx.concatenate([token_ids, prompt_ids.T])
        with logits_of(self._language_model, WantedLogits(rows=logit_rows)):
            logits = self._call(ids, layers, inputs)
        return logits, (self._new(rows), self._new(prompt))

    def _layers(self, buffers: KVBuffers, bounds: mx.array) -> list[BoundedLayer]:
        return [BoundedLayer(*layer, bounds, in_place=self._in_place) for layer in buffers]

    def _call(
        self, token_ids: mx.array, layers: Sequence[Any], inputs: Mapping[str, mx.array]
    ) -> mx.array:
        with self._attention.in_place():
            output = self._language_model(token_ids, cache=layers, **inputs)
        if not all(layer.was_attended for layer in layers):
            raise NotImplementedError("it attends in a way of its own")
        return output.logits  # type: ignore[no-any-return]

    def _new(self, layers: Sequence[BoundedLayer]) -> KVBuffers:
        return [] if self._in_place else [(layer.keys, layer.values) for layer in layers]


def plain_embedding(model: Any) -> Embed | None:
    """The embedding of `model` for text, if it depends on the token alone; else None."""
    token_ids, language_model = mx.arange(8)[None], model.language_model
    try:
        embed: Embed = getattr(language_model, "model", language_model).embed_tokens
        made = model.get_input_embeddings(token_ids, None, mask=mx.ones_like(token_ids))
        is_plain = read(mx.array_equal(embed(token_ids), made.inputs_embeds)).item()
    except Exception:
        logger.debug("this model has no mixed steps", exc_info=True)
        return None
    return embed if is_plain else None
