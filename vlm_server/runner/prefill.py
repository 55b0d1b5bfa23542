"""One prompt on its way through the model, chunk by chunk. Knows embeddings and one KV cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from vlm_server.ports import ImageSpan, NewRequest
from vlm_server.runner.encoder import ImageFeatures
from vlm_server.runner.grammar import Grammar
from vlm_server.runner.positions import Positions, forget_positions, prompt_positions


class Prefill:
    """A request from its first prompt token to its last."""

    def __init__(self, model: Any, request: NewRequest) -> None:
        self._model = model
        self._prompt = request.prompt
        self.sampling = request.sampling
        self._features: tuple[ImageFeatures, ...] = request.images
        self._inputs: _PromptInputs | None = None
        self.cache: list[Any] = make_prompt_cache(model.language_model)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self._prompt.token_ids

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must follow."""
        grammar: Grammar | None = self._prompt.grammar
        return grammar

    @property
    def num_tokens(self) -> int:
        return self._prompt.num_tokens

    @property
    def rope_delta(self) -> int:
        """How far positions run behind the token count after this prompt."""
        positions = self._inputs.positions if self._inputs else None
        return positions.delta if positions else 0

    def run(self, start: int, end: int) -> mx.array:
        """Prefill tokens `start` to `end`. Returns the last one's logits, (1, vocabulary), lazy."""
        inputs = self._inputs = self._inputs or _PromptInputs(
            self._model, self._prompt, self._features
        )
        self._features = ()
        language_model = self._model.language_model
        output = language_model(
            inputs.token_ids[:, start:end], cache=self.cache, **inputs.chunk(start, end)
        )
        mx.eval([layer.state for layer in self.cache])
        forget_positions(language_model)
        logits: mx.array = output.logits[:, -1]
        return logits


class _PromptInputs:
    """The whole prompt as the language model takes it; sliced for each chunk."""

    def __init__(self, model: Any, prompt: Any, features: tuple[ImageFeatures, ...]) -> None:
        self.token_ids = mx.array(prompt.token_ids)[None]
        self.positions: Positions | None = prompt_positions(model.language_model, prompt)
        made = model.get_input_embeddings(self.token_ids, None, mask=mx.ones_like(self.token_ids))
        forget_positions(model.language_model)
        self._per_layer_inputs: mx.array | None = made.per_layer_inputs
        self._embeds = _splice(made.inputs_embeds, prompt.images, features)
        self._visual_mask = _visual_mask(prompt.num_tokens, prompt.images, features)
        self._deepstack = (
            mx.concatenate([f.deepstack for f in features if f.deepstack is not None], axis=1)
            if self._visual_mask is not None
            else None
        )
        mx.eval(self._embeds)

    def chunk(self, start: int, end: int) -> dict[str, mx.array | list[mx.array]]:
        """The keyword arguments for tokens `start` to `end`."""
        kwargs: dict[str, mx.array | list[mx.array]] = {"inputs_embeds": self._embeds[:, start:end]}
        if self.positions is not None:
            kwargs["position_ids"] = self.positions.position_ids[:, :, start:end]
        if self._per_layer_inputs is not None:
            kwargs["per_layer_inputs"] = self._per_layer_inputs[:, start:end]
        if self._visual_mask is not None and self._deepstack is not None:
            mask = self._visual_mask[start:end]
            if mask.any():
                first = int(self._visual_mask[:start].sum())
                rows = self._deepstack[:, first : first + int(mask.sum())]
                kwargs["visual_pos_masks"] = mx.array(mask)[None]
                kwargs["deepstack_visual_embeds"] = list(rows)
        return kwargs


def _splice(
    text: mx.array, spans: tuple[ImageSpan, ...], features: tuple[ImageFeatures, ...]
) -> mx.array:
    """`text` (1, tokens, hidden) with each span's rows replaced by its picture's."""
    pieces, cursor = [], 0
    for span, image in zip(spans, features, strict=True):
        pieces += [text[0, cursor : span.start], image.rows.astype(text.dtype)]
        cursor = span.end
    return mx.concatenate([*pieces, text[0, cursor:]])[None]


def _visual_mask(
    num_tokens: int, spans: tuple[ImageSpan, ...], features: tuple[ImageFeatures, ...]
) -> NDArray[np.bool_] | None:
    """(tokens,) where deepstack adds; None for a prompt or a family without it."""
    mask = np.zeros(num_tokens, dtype=np.bool_)
    for span, image in zip(spans, features, strict=True):
        if image.visual_mask is not None:
            mask[span.start : span.end] = np.array(image.visual_mask)
    return mask if mask.any() else None
