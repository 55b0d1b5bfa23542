"""Chooses where in a prompt to snapshot a state that can't be trimmed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.lru import LruCache
from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Message, TextPart

_HEAD_BYTES = 4 << 20
"""Of the tokens of all system prompts that are remembered."""
_ENTRY_BYTES = 500


class SnapshotPoints:
    """Those of one model's prompts.

    Other prompts are likely to differ from this one after the system prompt, after each image,
    and after the last message, before the template's own words begin the answer.
    """

    def __init__(self, prompts: PromptTokenizer) -> None:
        self._prompts = prompts
        self._suffix = prompts.generation_suffix
        self._heads = LruCache[NDArray[np.int32]]("system prompts", _HEAD_BYTES)

    def of(
        self,
        messages: Sequence[Message],
        token_ids: NDArray[np.int32],
        spans: Sequence[MediaSpan],
        salt: str,
    ) -> tuple[int, ...]:
        """Numbers of tokens, ascending, none of them the whole prompt or inside a span.

        `salt` separates requests that must not share what is remembered.
        """
        num_tokens = len(token_ids)
        system = tuple(messages[:1] if messages and messages[0].role == "system" else ())
        points = {span.end for span in spans}
        points.add(_num_common(token_ids, self._head(system, salt)))
        if self._suffix and token_ids[-len(self._suffix) :].tolist() == self._suffix:
            points.add(num_tokens - len(self._suffix))
        inside = {point for span in spans for point in points if span.start < point < span.end}
        return tuple(sorted(point for point in points - inside if 0 < point < num_tokens))

    def _head(self, system: tuple[Message, ...], salt: str) -> NDArray[np.int32]:
        key = hashlib.sha256(msgspec.msgpack.encode((salt, system))).hexdigest()
        head = self._heads.get(key)
        if head is None:
            head = np.array(self._find_head(system), dtype=np.int32)
            self._heads.put(key, head, head.nbytes + _ENTRY_BYTES).release()
        return head

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
