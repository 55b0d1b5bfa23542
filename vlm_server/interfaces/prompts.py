"""A prepared request: token ids, media, and its cache references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.disk.tier import DiskRead
from vlm_server.cache.prompt_key import MediaSpan, PromptKey
from vlm_server.cache.references import CacheReferences
from vlm_server.interfaces.grammar import Grammar
from vlm_server.protocol import ImageUse, VideoUse

MediaInputs = Mapping[str, NDArray[Any]]
"""The vision tower's inputs of one span: `pixel_values`, grids and the like."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of an answer's text.

    tools: the tools that may be called, as chat templates have them; without any, no call is looked
    for. is_required: the answer, perhaps after reasoning, is only JSON that a grammar ensures:
    `[{"name": ..., "arguments": {...}}, ...]`. parallel: whether there may be more than one call.
    starts_in_reasoning: whether the prompt ends inside reasoning.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    is_required: bool = False
    parallel: bool = True
    starts_in_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request as the model takes it. Plain data, built once.

    token_ids: (tokens,) int32. spans: its media, in order; each is encoded at once.
    positions: (3, tokens) int32 for families with M-RoPE; after the prompt, token n has position
    n + `rope_delta`. snapshot_points: the token counts, ascending, after which a state is stored,
    for families whose states can't be cut. The first `atomic_prefill_tokens`, for families where
    tokens attend to later ones, are prefilled in one chunk or all cached; token_types: (tokens,)
    int32, is then 1 for media tokens and 0 for text. The answer follows `grammar`, if there is one,
    and is read as `answer_format` says; without one, all of its text is content. prediction: token
    ids that the answer is expected to be like. images, videos: those of the messages, as the model
    sees them. text: what ids that were given read as, if they are to be counted only. param: the
    field that it was made of, for errors.
    """

    token_ids: NDArray[np.int32]
    spans: tuple[MediaSpan, ...] = ()
    positions: NDArray[np.int32] | None = None
    rope_delta: int = 0
    snapshot_points: tuple[int, ...] = ()
    atomic_prefill_tokens: int = 0
    token_types: NDArray[np.int32] | None = None
    grammar: Grammar | None = None
    cache_salt: str = ""
    answer_format: AnswerFormat | None = AnswerFormat()
    prediction: tuple[int, ...] = ()
    images: tuple[ImageUse, ...] = ()
    videos: tuple[VideoUse, ...] = ()
    text: str = ""
    param: str = "prompt"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_atomic(self) -> bool:
        """Whether all is prefilled in one chunk: then no other prompt can reuse its KV."""
        return self.atomic_prefill_tokens == self.num_tokens

    @property
    def key(self) -> PromptKey:
        return PromptKey(self.token_ids, self.spans)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request after preparation. Its receiver owns `references`, and releases them once.

    inputs: the processor's output for each uncached span, by index in `prompt.spans`. load: the
    disk's entries of the prompt, if any; spans that it `covers` have no inputs.
    """

    prompt: PreparedPrompt
    references: CacheReferences
    inputs: Mapping[int, MediaInputs] = field(default_factory=dict)
    disk_read: DiskRead | None = None
