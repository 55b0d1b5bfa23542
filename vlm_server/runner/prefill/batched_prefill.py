"""Batched prefill: whole prompts in one call, as rows that are padded on the right.

All prompts start after the same number of cached tokens, so all rows share one position. No token
attends to its row's padding, which comes later: attention is causal. Each prompt's KV is a row of a
shared cache, which the decode batch takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.interfaces import NewRequest, PreparedPrompt
from vlm_server.interfaces.model_spec import ChunkPolicy
from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.kv.layers import buffers_of, new_layers, only_append
from vlm_server.runner.kv.packed_cache import plain_of
from vlm_server.runner.kv.prompt_kv import PromptKV
from vlm_server.runner.kv.segments import restore
from vlm_server.runner.kv.window_cache import buffer_capacity
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.adapters import adapters_of_rows, applied
from vlm_server.runner.model.lm_head import WantedLogits, has_last_token_head, logits_of


def can_batch_prefills(loaded: LoadedModel) -> bool:
    """Whether all layers only append, logits can be computed for chosen tokens, and no token
    attends to later ones."""
    if loaded.spec.chunk_policy is ChunkPolicy.NOWHERE:
        return False
    layers = new_layers(loaded.language_model)
    return only_append(layers) and has_last_token_head(loaded.language_model)


def launch_batched(
    loaded: LoadedModel, requests: Sequence[NewRequest]
) -> tuple[dict[str, PromptKV], mx.array]:
    """Begin the prefill of prompts with cached prefixes of one length and no media after them.

    Returns the prompts by request, and logits of their last tokens, (prompts, vocabulary), lazy.
    """
    prompts, start = [request.prompt for request in requests], requests[0].prefix.length
    ends = [prompt.num_tokens for prompt in prompts]
    cache = _restore_prefixes(loaded, requests, start, buffer_capacity(max(ends)))
    token_ids, arguments = _inputs(loaded, prompts, start)
    places = mx.array([end - start - 1 for end in ends])
    wanted = WantedLogits(places=places)
    arguments |= adapters_of_rows([prompt.adapter for prompt in prompts])
    logits_wanted = logits_of(loaded.language_model, wanted)
    with loaded.attention.in_place(), logits_wanted as seen, applied(arguments) as others:
        output = loaded.language_model(token_ids, cache=loaded.model_layers(cache), **others)
    loaded.forget_positions()
    states = seen.all if loaded.text.keeps_hidden else None
    last_hidden = _launch_head(loaded, states, token_ids, arguments, cache, places)
    logits: mx.array = output.logits[:, -1]
    layers = [
        RowsKVCache(
            layer.keys,
            layer.values,
            [0] * len(ends),
            ends,
            storage=loaded.kv_storage,
            plain=plain_of(layer),
        )
        for layer in cache
    ]
    mx.async_eval(logits, buffers_of(layers))  # type: ignore[no-untyped-call]
    prompts_kv = {
        request.request_id: PromptKV(request, layers, row) for row, request in enumerate(requests)
    }
    for prompt_kv, hidden in zip(prompts_kv.values(), last_hidden, strict=False):
        prompt_kv.hidden = hidden
    return prompts_kv, logits


def _launch_head(
    loaded: LoadedModel,
    hidden: mx.array | None,
    token_ids: mx.array,
    arguments: dict[str, mx.array],
    cache: list[Any],
    places: mx.array,
) -> list[mx.array]:
    """Append the tokens to the layers of the draft head; returns the states at `places`."""
    head = loaded.draft_head
    if head is None or hidden is None:
        return []
    head.append_chunk(token_ids, arguments, hidden, None, loaded.head_layers(cache))
    last = hidden[mx.arange(len(hidden)), places][:, None]
    return list(mx.split(last, len(hidden)))


def _inputs(
    loaded: LoadedModel, prompts: Sequence[PreparedPrompt], start: int
) -> tuple[mx.array, dict[str, mx.array]]:
    """The tokens from `start` on, (prompts, tokens), and the model's other arguments.

    Padding repeats the last token.
    """
    count = max(prompt.num_tokens for prompt in prompts) - start
    padding = [(0, count + start - prompt.num_tokens) for prompt in prompts]
    by_row = zip(prompts, padding, strict=True)
    rows = [np.pad(prompt.token_ids[start:], widths, "edge") for prompt, widths in by_row]
    token_ids = mx.array(np.stack(rows))
    arguments = loaded.embed_text(token_ids)
    positions = [prompt.positions for prompt in prompts if prompt.positions is not None]
    if positions:
        rows = [
            np.pad(position[:, start:], ((0, 0), widths), "edge")
            for position, widths in zip(positions, padding, strict=True)
        ]
        arguments["position_ids"] = mx.array(np.stack(rows, axis=1))
    return token_ids, arguments


def _restore_prefixes(
    loaded: LoadedModel, requests: Sequence[NewRequest], length: int, capacity: int
) -> list[Any]:
    """Layers with a row for each prompt, which holds its cached prefix of `length` tokens."""
    stacked = loaded.new_layers()
    for layer in stacked:
        layer.step, layer.offset = capacity, length
    if not length:
        return stacked
    restored_layers: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    """Restored layers by segments, which prompts with the same prefix share."""
    rows = []
    for request in requests:
        segments = tuple((id(segment), count) for segment, count in request.prefix.segments)
        if segments not in restored_layers:
            restored_layers[segments] = loaded.new_layers()
            restore(restored_layers[segments], request.prefix, capacity - 1)
        rows.append(restored_layers[segments])
    for layer, prompt_layers in zip(stacked, zip(*rows, strict=True), strict=True):
        layer.keys = mx.concatenate([source.keys for source in prompt_layers])
        layer.values = mx.concatenate([source.values for source in prompt_layers])
    return stacked
