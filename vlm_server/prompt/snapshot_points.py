"""Chooses where in a prompt to snapshot a state that can't be trimmed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Message, TextPart

_MAX_SYSTEM_PROMPTS = 64


class SnapshotPoints:
    """Those of one model's prompts.

    Other prompts are likely to differ from this one after the system prompt, after each image,
    and after the last message, before the template's own words begin the answer.
    """

    def __init__(self, prompts: PromptTokenizer) -> None:
        self._prompts = prompts
        self._suffix = prompts.generation_suffix
        self._head = lru_cache(_MAX_SYSTEM_PROMPTS)(self._find_head)

    def of(
        self,
        messages: Sequence[Message],
        token_ids: NDArray[np.int32],
        spans: Sequence[MediaSpan],
    ) -> tuple[int, ...]:
        """Numbers of tokens, ascending, none of them the whole prompt or inside a span."""
        num_tokens = len(token_ids)
        system = tuple(messages[:1] if messages[0].role == "system" else ())
        points = {span.end for span in spans}
        points.add(_num_common(token_ids, np.array(self._head(system), dtype=np.int32)))
        if self._suffix and token_ids[-len(self._suffix) :].tolist() == self._suffix:
            points.add(num_tokens - len(self._suffix))
        inside = {point for span in spans for point in points if span.start < point < span.end}
        return tuple(sorted(point for point in points - inside if 0 < point < num_tokens))

    def _find_head(self, system: tuple[Message, ...]) -> list[int]:
        """The tokens of all prompts with that system message, before what the user says."""
        if not all(isinstance(part, TextPart) for message in system for part in message.content):
            return []
        one, other = (
            self._prompts.tokenize([*system, Message("user", (TextPart(text),))], [])
            for text in ("A", "B")
        )
        return one[: _num_common(np.array(one), np.array(other))]


def _num_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    unequal = np.flatnonzero(one[:length] != other[:length])
    return int(unequal[0]) if len(unequal) else length
