"""The vectors of whole inputs, by the modules of mlx-vlm's embedding models.

Inputs are rows that are padded on the right. mlx-vlm's models mask the padding; where attention is
causal, no token attends to it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_vlm.models.pooling import mean_pooling, normalize_embeddings

from vlm_server.runner.model.deepstack import Deepstack


@dataclass(frozen=True, slots=True)
class EmbeddingBatch:
    """Inputs for one call.

    token_ids: (rows, tokens). lengths: the tokens of each row before its padding. arguments: the
    language model's, such as `inputs_embeds`; none for models that read text alone.
    """

    token_ids: mx.array
    lengths: tuple[int, ...]
    arguments: Mapping[str, mx.array]

    @property
    def mask(self) -> mx.array:
        """(rows, tokens) int32: 1 for tokens, 0 for padding."""
        places = mx.arange(self.token_ids.shape[1])
        return (places < mx.array(self.lengths)[:, None]).astype(mx.int32)


Embed = Callable[[Any, EmbeddingBatch], mx.array]
"""(mlx-vlm's model, inputs) to vectors: (rows, dimensions), or (rows, tokens, dimensions)."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The way a family makes vectors.

    is_multi: whether there is a vector for each token. instruction: the prompt that its makers use,
    where a checkpoint names none. template: that of its prompts; empty for the checkpoint's, or for
    the bare text of a family that reads text alone. processor: the `model_type` whose processor it
    shares; empty for its own. batches_lengths: whether inputs of different lengths may be one
    batch. first_position: of a text's first token, where that is not 0. of_pairs: whether an input
    is a pair of texts, whose only vector is one number, its score.
    """

    embed: Embed
    is_multi: bool = False
    instruction: str = ""
    template: str = ""
    processor: str = ""
    batches_lengths: bool = True
    first_position: int = 0
    of_pairs: bool = False


def by_model(model: Any, batch: EmbeddingBatch) -> mx.array:
    """Vectors by the call of a model that reads text alone."""
    output = model(batch.token_ids, attention_mask=batch.mask)
    return output.text_embeds  # type: ignore[no-any-return]


def by_classifier(model: Any, batch: EmbeddingBatch) -> mx.array:
    """Scores of pairs of texts, (rows, 1), by a classifier with one label."""
    output = model(batch.token_ids, attention_mask=batch.mask, **batch.arguments)
    return mx.sigmoid(output.logits.astype(mx.float32))


@dataclass(frozen=True, slots=True)
class YesOrNo:
    """The question whether a document suits a query, as a model's makers ask it."""

    instruction: str
    before_query: str
    before_document: str


def by_last_token(model: Any, batch: EmbeddingBatch) -> mx.array:
    """The normalized state of each row's last token, of a causal language model."""
    arguments = Deepstack.BY_LAYER.arguments(batch.arguments)
    states = model.language_model.model(batch.token_ids, **arguments)
    pooled = states[mx.arange(len(states)), mx.array(batch.lengths) - 1]
    return normalize_embeddings(pooled) if model.normalize else pooled  # type: ignore[no-any-return]


def by_projection(name: str) -> Embed:
    """The normalized projection, by the layer `name`, of every token of a causal model."""

    def embed(model: Any, batch: EmbeddingBatch) -> mx.array:
        states = model._last_hidden_state(batch.arguments["inputs_embeds"])
        projected = getattr(model, name)(states)
        norms = mx.linalg.norm(projected, axis=-1, keepdims=True)
        return projected / norms  # type: ignore[no-any-return]

    return embed


def by_mean(model: Any, batch: EmbeddingBatch) -> mx.array:
    """The normalized mean of all tokens, which attend to each other."""
    states = model.language_model(batch.arguments["inputs_embeds"], batch.mask)
    mean = mean_pooling(states, batch.mask)
    return normalize_embeddings(mean)  # type: ignore[no-any-return]


_JOINED = """\
{%%- for message in messages %%}
{%%- if message.content is string %%}{{- message.content }}
{%%- else %%}
{%%- for part in message.content %%}
{{- '%(image)s' if part.type == 'image' else part.text }}
{%%- endfor %%}
{%%- endif %%}
{%%- endfor %%}
"""
_PAGE = """\
{%%- set parts = messages[-1].content %%}
{%%- set parts = [{'type': 'text', 'text': parts}] if parts is string else parts %%}
{%%- set texts = parts | selectattr('type', 'equalto', 'text') | list %%}
{%%- if texts | length < parts | length %%}{{- '%(before)s' }}
{%%- for part in parts %%}{{- '%(image)s' if part.type == 'image' else part.text }}{%% endfor %%}
{%%- if not texts %%}{{- 'Describe the image.' }}{%% endif %%}{{- '%(after)s' }}
{%%- elif input_type is defined and input_type == 'query' %%}
{{- 'Query: ' }}{%% for part in parts %%}{{- part.text }}{%% endfor %%}{{- '%(spare)s' * 10 }}
{%%- else %%}{%% for part in parts %%}{{- part.text }}{%% endfor %%}
{%%- endif %%}
"""


def joined_template(image: str) -> str:
    """The template of models that were trained without turns: texts and images as they come."""
    return _JOINED % {"image": image}


def page_template(before: str, image: str, after: str, spare: str) -> str:
    """The template of ColPali's models.

    A page is asked for a description; a query gets `spare` tokens, in which a model may put more
    vectors; any other text stands alone.
    """
    return _PAGE % {"before": before, "image": image, "after": after, "spare": spare}
