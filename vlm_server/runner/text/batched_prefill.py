"""Batched prefill: whole prompts in one call, as rows that are padded on the right.

All begin after the same number of cached tokens, so that one position counts for all rows, and no
token sees the padding of its row, which is after it: attention is causal. Each prompt's KV is a row
of a shared cache, that the decode batch takes whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache

from vlm_server.interfaces import NewRequest, PreparedPrompt
from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.kv.segments import buffer_capacity, only_append, restore
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.lm_head import WantedLogits, has_last_token_head, logits_of
from vlm_server.runner.text.prefill import Prefilled, embedded


def can_batch_prefills(loaded: LoadedModel) -> bool:
    """Whether this model's layers only append, and its logits are of tokens that we choose."""
    layers = make_prompt_cache(loaded.language_model)
    return only_append(layers) and has_last_token_head(loaded.language_model)


def launch_batched(
    loaded: LoadedModel, requests: Sequence[NewRequest]
) -> tuple[dict[str, Prefilled], mx.array]:
    """Begin the prefill of prompts whose cached prefixes are equally long, with no media after.

    Returns them by request, and the logits of the last token of each, (prompts, vocabulary), lazy.
    """
    prompts, start = [request.prompt for request in requests], requests[0].prefix.length
    ends = [prompt.num_tokens for prompt in prompts]
    cache = _restored(loaded, requests, start, buffer_capacity(max(ends)))
    token_ids, arguments = _inputs(loaded, prompts, start)
    places = mx.array([end - start - 1 for end in ends])
    wanted = WantedLogits(places=places)
    with loaded.attention.in_place(), logits_of(loaded.language_model, wanted):
        output = loaded.language_model(token_ids, cache=cache, **arguments)
    loaded.forget_positions()
    logits: mx.array = output.logits[:, -1]
    shared = [RowsKVCache(each.keys, each.values, [0] * len(ends), ends) for each in cache]
    mx.async_eval(logits, [layer.state for layer in shared])  # type: ignore[no-untyped-call]
    read = [Prefilled(loaded, request, shared, row) for row, request in enumerate(requests)]
    return dict(zip((request.request_id for request in requests), read, strict=True)), logits


def _inputs(
    loaded: LoadedModel, prompts: Sequence[PreparedPrompt], start: int
) -> tuple[mx.array, dict[str, mx.array]]:
    """The tokens from `start` on, (prompts, tokens), and what else the language model takes.

    Padding repeats the last token.
    """
    count = max(prompt.num_tokens for prompt in prompts) - start
    padding = [(0, count + start - prompt.num_tokens) for prompt in prompts]
    by_row = zip(prompts, padding, strict=True)
    rows = [np.pad(prompt.token_ids[start:], widths, "edge") for prompt, widths in by_row]
    token_ids = mx.array(np.stack(rows))
    arguments = embedded(loaded, token_ids)
    positions = [prompt.positions for prompt in prompts if prompt.positions is not None]
    if positions:
        rows = [
            np.pad(each[:, start:], ((0, 0), widths), "edge")
            for each, widths in zip(positions, padding, strict=True)
        ]
        arguments["position_ids"] = mx.array(np.stack(rows, axis=1))
    return token_ids, arguments


def _restored(
    loaded: LoadedModel, requests: Sequence[NewRequest], length: int, capacity: int
) -> list[Any]:
    """Layers with a row for each prompt, which holds what is cached of it: `length` tokens."""
    stacked = make_prompt_cache(loaded.language_model)
    for layer in stacked:
        layer.step, layer.offset = capacity, length
    if not length:
        return stacked  # type: ignore[no-any-return]
    made: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    """By their segments: prompts that begin alike have the same."""
    rows = []
    for request in requests:
        segments = tuple((id(segment), count) for segment, count in request.prefix.segments)
        if segments not in made:
            made[segments] = make_prompt_cache(loaded.language_model)
            restore(made[segments], request.prefix, capacity - 1)
        rows.append(made[segments])
    for layer, same in zip(stacked, zip(*rows, strict=True), strict=True):
        layer.keys = mx.concatenate([each.keys for each in same])
        layer.values = mx.concatenate([each.values for each in same])
    return stacked  # type: ignore[no-any-return]
