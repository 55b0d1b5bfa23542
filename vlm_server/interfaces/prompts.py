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
from vlm_server.protocol import DocumentUse, ImageUse, VideoUse

MAX_OPTION_TOKENS = 256
"""The most tokens of an option, and of all options that are scored in one step: each has logits of
the whole vocabulary, in float32."""
MediaInputs = Mapping[str, NDArray[Any]]
"""The vision tower's inputs of one span: `pixel_values`, grids and the like."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of an answer's text."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that may be called, in the chat templates' form; without any, no call is parsed."""
    is_required: bool = False
    """Whether the answer, after optional reasoning, is only JSON that a grammar ensures:
    `[{"name": ..., "arguments": {...}}, ...]`."""
    parallel: bool = True
    """Whether there may be more than one call."""
    starts_in_reasoning: bool = False
    """Whether the prompt ends inside reasoning."""


MAX_INNER_TOKENS = 64
"""Maximum tokens of a chunk after a point inside it, up to the next one or its end."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request as the model gets it. Plain data, built once."""

    token_ids: NDArray[np.int32]
    """(tokens,)"""
    spans: tuple[MediaSpan, ...] = ()
    """Its media, in order."""
    positions: NDArray[np.int32] | None = None
    """(3, tokens), for families with M-RoPE."""
    rope_delta: int = 0
    """The offset from a later token's index to its rotary position."""
    snapshot_points: tuple[int, ...] = ()
    """Ascending token counts after which to store a state, for families whose states can't be
    cut."""
    chunk_ends: tuple[int, ...] = ()
    """Those of them at which a chunk ends, for families with recurrent states, unless it keeps the
    states there: see `Backend.max_inner_points`."""
    atomic_prefill_tokens: int = 0
    """The number of first tokens to prefill in one chunk, or to have cached completely, for
    families where tokens attend to later ones."""
    token_types: NDArray[np.int32] | None = None
    """(tokens,): 1 for media tokens, 0 for text, for families where tokens attend to later ones; 1
    for the second text of a pair."""
    grammar: Grammar | None = None
    """The grammar of the answer."""
    cache_salt: str = ""
    adapter: int = 0
    """The number of its LoRA adapter in `ModelSpec.adapters`; 0 is none."""
    adapter_digest: str = ""
    answer_format: AnswerFormat | None = AnswerFormat()
    """The format to parse the answer by; None if all of its text is content."""
    prediction: tuple[int, ...] = ()
    """Token ids of a text that the answer is expected to resemble."""
    images: tuple[ImageUse, ...] = ()
    """The images of the messages, as the model sees them."""
    videos: tuple[VideoUse, ...] = ()
    """The videos of the messages, as the model sees them."""
    documents: tuple[DocumentUse, ...] = ()
    """The documents of the messages, as the model sees their pages."""
    text: str = ""
    """The text of token ids that the client gave to be counted only."""
    param: str = "prompt"
    """The field of the request that the prompt was made of, for errors."""

    vector_key: str = ""
    """The key of its vectors or its score in their cache; empty for a prompt to be answered."""
    options: tuple[tuple[int, ...], ...] = ()
    """Token ids of the options of a question, the shortest first, each once."""
    option_places: tuple[int, ...] = ()
    """For each option of the request, its place in `options`."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def points_inside(self, start: int, end: int) -> tuple[int, ...]:
        """The chunk ends after token `start` and before `end`."""
        return tuple(point for point in self.chunk_ends if start < point < end)

    @property
    def is_pooled(self) -> bool:
        """Whether vectors or a score are wanted of it, and no answer."""
        return bool(self.vector_key)

    @property
    def prefix_salt(self) -> str:
        """Prompts with different ones share no KV: of different tenants, or adapters."""
        return f"{self.adapter_digest}\0{self.cache_salt}"

    @property
    def is_atomic(self) -> bool:
        """Whether the prompt must be prefilled in one chunk: no other prompt can reuse its KV."""
        return self.atomic_prefill_tokens == self.num_tokens

    @property
    def key(self) -> PromptKey:
        return PromptKey(self.token_ids, self.spans)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request after preparation. Its receiver owns `references`, and releases them once."""

    prompt: PreparedPrompt
    references: CacheReferences
    inputs: Mapping[int, MediaInputs] = field(default_factory=dict)
    """The encoder's inputs of uncached spans, by index in `prompt.spans`; none for spans that
    `disk_read` covers."""
    disk_read: DiskRead | None = None
    """The disk's entries of the prompt, if any."""
    vectors: NDArray[np.float32] | None = None
    """(vectors, dimensions), if they are cached."""
