"""Prefill of one prompt, chunk by chunk, into a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import KVCache
from numpy.typing import NDArray

from vlm_server.interfaces import Branches, NewRequest
from vlm_server.runner.backends.bounded_layer import forget_columns
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.encode.encoder import ImageFeatures
from vlm_server.runner.kv.layers import buffers_of, only_append
from vlm_server.runner.kv.prompt_kv import PrefixEntry, PromptKV
from vlm_server.runner.kv.segments import LayerStates, restore, snapshot
from vlm_server.runner.kv.window_cache import WindowKVCache, buffer_capacity
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.adapters import ADAPTERS, adapters_of_rows, applied
from vlm_server.runner.model.chunks import PaddedChunk, PaddedChunkCache, PromptChunk, StepOutput
from vlm_server.runner.model.deepstack import EMBEDS, MASK, Deepstack
from vlm_server.runner.model.lm_head import WantedLogits, has_last_token_head, logits_of
from vlm_server.runner.prefill.branches import OptionBranches


class Prefill:
    """The prefill of one request: from its first uncached prompt token to its last."""

    def __init__(self, loaded: LoadedModel, request: NewRequest) -> None:
        self._loaded = loaded
        self._prompt = request.prompt
        self._cache = loaded.new_layers()
        self._model_cache = loaded.model_layers(self._cache)
        self.kv = PromptKV(request, self._cache)
        for layer in self._cache:
            if isinstance(layer, KVCache):  # allocated once for all chunks
                layer.step = buffer_capacity(request.prompt.num_tokens)
        has_head = has_last_token_head(loaded.language_model)
        self._can_be_compiled = has_head and not request.prompt.atomic_prefill_tokens
        """Whether logits are of chosen tokens, and no token attends to later ones."""
        padding = loaded.backend.prefill_padding_tokens
        self._multiple = padding if self._supports_padding() else 1
        """Multiple to which chunks are padded unless they are compiled steps."""
        self._logits: mx.array | None = None
        """The logits of the last chunk's last token."""
        self._is_compiled = False
        """Whether the last chunk was a compiled step: only then does `wait` wait for its logits."""
        self.is_piggybacked = False
        """Whether the last chunk is part of a mixed step that may still run."""
        self._num_launched = 0
        """Tokens of the prompt up to the end of the last chunk; 0 before the first one."""
        self._before_media: dict[int, LayerStates] = {}
        """The state before the last chunk, if that ended inside a media item."""
        if request.prefix.length:
            restore(self._cache, request.prefix, request.prompt.num_tokens)
        self._inputs: PromptInputs | None = PromptInputs(loaded, request)
        self.options = OptionBranches(loaded, request.prompt)

    def chunk(self, start: int, end: int) -> PromptChunk | None:
        """Tokens `start` to `end` for a mixed step; None if they need a step of their own."""
        return self._chunk(start, end) if self._can_be_compiled else None

    def launch(self, start: int, end: int, output: StepOutput | None = None) -> mx.array:
        """Begin tokens `start` to `end`; `output` is that of a mixed step that did so.

        Returns the last token's logits, (1, vocabulary), lazy.
        """
        self._keep_before_media(start, end)
        self._num_launched = end
        self.is_piggybacked = output is not None
        if output is None:
            output = self._launch_alone(start, end)
        else:
            self._is_compiled = True
        self._launch_head(start, end, output.hidden)
        self._loaded.forget_positions()
        points = self._prompt.points_inside(start, end) if output.states else ()
        states = dict(zip(points, output.states, strict=True))
        for point in self._prompt.snapshot_points:
            if start < point <= end and point not in self.kv.snapshots:
                self.kv.snapshots[point] = snapshot(
                    self._cache, num_after=end - point, states=states.get(point)
                )
        if end == self._prompt.num_tokens:
            self._inputs = None
            for layer in self._cache:
                vars(layer).pop("step", None)  # grows by KVCache's own steps from here on
                if isinstance(layer, WindowKVCache):
                    layer.shrink()
        self._logits = output.logits[:, -1]
        return self._logits

    def launch_options(self, branches: Sequence[Branches]) -> mx.array:
        """Begin to score the options of `branches`, after the whole prompt.

        Returns the logits of the prompt's last token, (1, vocabulary), lazy.
        """
        assert self._logits is not None
        self.is_piggybacked = False
        self.options.launch(self._model_cache, self._logits, branches)
        return self._logits

    def wait(self) -> None:
        """Wait for the chunk that was launched last."""
        launched = [self._logits] if self._is_compiled else []
        mx.eval(launched, buffers_of(self._cache))
        self.is_piggybacked = False

    def end_cancelled(self) -> PrefixEntry | None:
        """End a cancelled prefill; returns the entry of its prefilled part for the prefix cache.

        Waits for the last chunk, and raises its error. None if its logits are NaN, or if the
        prompt has not got beyond its first media item.
        """
        self._inputs = None
        if self._logits is None or to_numpy(mx.isnan(self._logits).any()):
            return None
        self.wait()
        end = self._prompt.key.floor(self._num_launched)
        if not end:
            return None
        self.kv.snapshots |= self._before_media
        if end == self._num_launched:
            self.kv.snapshots[end] = snapshot(self._cache)
        return self.kv.entry(end, is_unused=True)

    def _keep_before_media(self, start: int, end: int) -> None:
        """Keep the state before tokens `start` to `end`, if they end inside a media item."""
        key = self._prompt.key
        if self._num_launched and key.floor(start) == start:
            is_inside = key.floor(end) < end
            self._before_media = {start: snapshot(self._cache)} if is_inside else {}

    def _launch_alone(self, start: int, end: int) -> StepOutput:
        """The output, whose logits are the last token's; by a compiled step if there is one.

        Else the parts between the points inside have steps of their own.
        """
        output = self._launch_compiled(start, end)
        if output is not None:
            return output
        hidden = []
        for first, last in pairwise([start, *self._prompt.points_inside(start, end), end]):
            output = self._launch_compiled(first, last) if (first, last) != (start, end) else None
            output = self._launch_eager(first, last) if output is None else output
            if last < end:
                mx.eval(output.logits, buffers_of(self._cache))  # the next one writes in place
                self.kv.snapshots[last] = snapshot(self._cache)
                self._loaded.forget_positions()
            hidden.append(output.hidden)
        states = [each for each in hidden if each is not None]
        assert output is not None
        return StepOutput(output.logits, mx.concatenate(states, axis=1) if states else None)

    def _launch_compiled(self, start: int, end: int) -> StepOutput | None:
        """None if there is no compiled step."""
        chunk = self._chunk(start, end)
        output = self._loaded.text.prefill(chunk) if self._can_be_compiled else None
        self._is_compiled = output is not None
        return output

    def _launch_eager(self, start: int, end: int) -> StepOutput:
        padded = PaddedChunk.around(start, end, self._multiple)
        output = self._forward_eager(padded, self._chunk(start, end))
        launched = [output.logits] if end == self._prompt.num_tokens else []
        mx.async_eval(launched, buffers_of(self._model_cache))  # type: ignore[no-untyped-call]
        return output

    def _launch_head(self, start: int, end: int, hidden: mx.array | None) -> None:
        """Append the chunk to the layers of the draft head, if there is one."""
        head = self._loaded.draft_head
        if head is None or hidden is None:
            return
        chunk, layers = self._chunk(start, end), self._loaded.head_layers(self._cache)
        head.append_chunk(chunk.token_ids, chunk.inputs, hidden, self.kv.hidden, layers)
        self.kv.hidden = mx.contiguous(hidden[:, -1:])
        mx.async_eval(self.kv.hidden, buffers_of(layers))  # type: ignore[no-untyped-call]

    def _chunk(self, start: int, end: int) -> PromptChunk:
        assert self._inputs is not None
        token_ids, arguments = (
            self._inputs.token_ids(start, end),
            self._inputs.arguments(start, end),
        )
        return PromptChunk(
            token_ids,
            arguments,
            self._model_cache,
            buffer_capacity(self._prompt.num_tokens),
            tuple(point - start for point in self._prompt.points_inside(start, end)),
        )

    def _forward_eager(self, padded: PaddedChunk, chunk: PromptChunk) -> StepOutput:
        """The output, whose logits are the last token's, by mlx-vlm's model not compiled."""
        language_model, cache = self._loaded.language_model, self._model_cache
        token_ids, arguments = chunk.token_ids, chunk.inputs
        forget_columns(cache)
        if not padded.is_exact:
            cache = [PaddedChunkCache(layer, padded) for layer in cache]
            token_ids, arguments = chunk.padded(padded.num_before, padded.num_after)
        wanted = WantedLogits(num_padding=padded.num_after)
        arguments = {name: arguments[name] for name in arguments if name != ADAPTERS}
        arguments |= adapters_of_rows([self._prompt.adapter])
        logits = logits_of(language_model, wanted)
        with self._loaded.attention.in_place(), logits as seen, applied(arguments) as others:
            model_arguments = self._loaded.family.deepstack.arguments(others)
            output = language_model(token_ids, cache=cache, **model_arguments)
        hidden = None
        states = seen.all if self._loaded.text.keeps_hidden else None
        if states is not None:
            hidden = states[:, padded.num_before :][:, : chunk.num_tokens]
        return StepOutput(output.logits, hidden)

    def _supports_padding(self) -> bool:
        """Whether no layer attends to padding, or has it in its states, in mlx-vlm's own code."""
        is_by_place = self._loaded.family.deepstack is Deepstack.BY_PLACE
        return self._can_be_compiled and only_append(self._model_cache) and not is_by_place


class PromptInputs:
    """The language model's arguments for a prompt after its prefix, sliced for each chunk."""

    def __init__(self, loaded: LoadedModel, request: NewRequest) -> None:
        self._prompt, self._start = request.prompt, request.prefix.length
        self._has_adapters = bool(loaded.spec.adapters)
        self._token_ids = mx.array(self._prompt.token_ids[self._start :])[None]
        self._token_arguments = loaded.embed_text(self._token_ids)
        later = (span for span in self._prompt.spans if span.start >= self._start)
        spans = [(span.start - self._start, span.end - self._start) for span in later]
        features = tuple[Any, ...](request.features)
        self._token_arguments["inputs_embeds"] = _splice(
            self._token_arguments["inputs_embeds"], spans, features
        )
        self._visual_mask = _visual_mask(self._token_ids.shape[1], spans, features)
        self._deepstack: mx.array | None = None
        if self._visual_mask is not None:
            rows = [image.deepstack for image in features if image.deepstack is not None]
            self._deepstack = mx.concatenate(rows, axis=1)
        mx.async_eval(self._token_arguments["inputs_embeds"])  # type: ignore[no-untyped-call]

    def token_ids(self, start: int, end: int) -> mx.array:
        """Tokens `start` to `end` of the prompt, (1, tokens)."""
        return self._token_ids[:, start - self._start : end - self._start]

    def arguments(self, start: int, end: int) -> dict[str, Any]:
        """The keyword arguments for tokens `start` to `end` of the prompt."""
        kwargs: dict[str, Any] = {}
        if self._prompt.positions is not None:
            kwargs["position_ids"] = mx.array(self._prompt.positions[:, None, start:end])
        if self._has_adapters:
            kwargs[ADAPTERS] = mx.full((1, end - start), self._prompt.adapter, mx.int32)
        if self._prompt.token_types is not None:
            kwargs["mm_token_type_ids"] = mx.array(self._prompt.token_types[None, start:end])
        start, end = start - self._start, end - self._start
        kwargs |= {name: array[:, start:end] for name, array in self._token_arguments.items()}
        if self._visual_mask is not None and self._deepstack is not None:
            mask = self._visual_mask[start:end]
            if mask.any():
                first = int(self._visual_mask[:start].sum())
                rows = self._deepstack[:, first : first + int(mask.sum())]
                kwargs |= {EMBEDS: _scatter_rows(rows, mask), MASK: mx.array(mask)[None]}
        return kwargs


def _splice(
    text: mx.array, spans: list[tuple[int, int]], features: tuple[ImageFeatures, ...]
) -> mx.array:
    """`text` (1, tokens, hidden) with each span's rows replaced by its features."""
    pieces, cursor = [], 0
    for (start, end), image in zip(spans, features, strict=True):
        pieces += [text[0, cursor:start], image.rows.astype(text.dtype)]
        cursor = end
    return mx.concatenate([*pieces, text[0, cursor:]])[None]


def _scatter_rows(rows: mx.array, mask: NDArray[np.bool_]) -> mx.array:
    """`rows`, (layers, visual tokens, hidden), as (1, tokens, layers, hidden), 0 for text."""
    layers, _, hidden = rows.shape
    array = mx.zeros((len(mask), layers, hidden), dtype=rows.dtype)
    array[mx.array(np.flatnonzero(mask))] = rows.transpose(1, 0, 2)
    return array[None]


def _visual_mask(
    num_tokens: int, spans: list[tuple[int, int]], features: tuple[ImageFeatures, ...]
) -> NDArray[np.bool_] | None:
    """(tokens,) bool: tokens that deepstack adds to; None if there is none."""
    mask = np.zeros(num_tokens, dtype=np.bool_)
    for (start, end), image in zip(spans, features, strict=True):
        if image.visual_mask is not None:
            mask[start:end] = to_numpy(image.visual_mask)
    return mask if mask.any() else None
