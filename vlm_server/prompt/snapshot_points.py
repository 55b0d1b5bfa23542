"""Snapshot points: where in a prompt a state that can't be trimmed is stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.lru import LruCache
from vlm_server.cache.prompt_key import MediaSpan
from vlm_server.errors import InvalidRequest
from vlm_server.prompt.template.chat import Chat
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Message, TextPart

_HEAD_BYTES = 4 << 20
"""Memory for the tokens of system prompts and their tools."""
_ENTRY_BYTES = 500


Tokens = NDArray[np.int32]


class SnapshotPoints:
    """The snapshot points of one model's prompts.

    The next prompt is likely to differ after the system prompt, after an image, or after the last
    message; and at the first image, if an agent keeps only its latest ones.
    """

    def __init__(self, prompts: PromptTokenizer) -> None:
        self._prompts = prompts
        self._ends = LruCache[tuple[Tokens, Tokens]]("system prompts", _HEAD_BYTES)

    def points_in(
        self, chat: Chat, token_ids: Tokens, spans: Sequence[MediaSpan], salt: str
    ) -> tuple[int, ...]:
        """Token counts, ascending, none of them the whole prompt or inside a span.

        spans: of whole images and videos. salt: separates requests that must not share cached
        tokens of system prompts.
        """
        num_tokens = len(token_ids)
        start = chat.messages[:1]
        system = start if start and start[0].role == "system" else ()
        head, suffix = self._ends_of(replace(chat, messages=system, continue_final=False), salt)
        points = {span.end for span in spans}
        points |= {_num_common(token_ids, head), self._first_image(chat, token_ids)}
        num_before = num_tokens - len(suffix)
        if len(suffix) and np.array_equal(token_ids[max(num_before, 0) :], suffix):
            points.add(num_before)
        inside = {point for span in spans for point in points if span.start < point < span.end}
        return tuple(sorted(point for point in points - inside if 0 < point < num_tokens))

    def _first_image(self, chat: Chat, token_ids: Tokens) -> int:
        """The number of tokens up to the first image; 0 if only a system message is before it."""
        messages = chat.messages
        index = next((i for i, message in enumerate(messages) if not _is_text(message)), 0)
        if all(message.role == "system" for message in messages[:index]):
            return 0
        imageless = msgspec.structs.replace(messages[index], content=(TextPart("A"),))
        shorter = replace(chat, messages=(*messages[:index], imageless), continue_final=False)
        try:
            return _num_common(token_ids, np.array(self._prompts.tokenize(shorter, [])))
        except InvalidRequest:  # the template requires more messages
            return 0

    def _ends_of(self, chat: Chat, salt: str) -> tuple[Tokens, Tokens]:
        """The tokens before the user's text, and those of the generation prompt.

        They are the same in all prompts with this system message, tools and variables.
        """
        tools_and_variables = json.dumps([list(chat.tools), dict(chat.variables)])
        key_parts = msgspec.msgpack.encode((salt, chat.messages, tools_and_variables))
        key = hashlib.sha256(key_parts).hexdigest()
        ends = self._ends.get(key)
        if ends is None:
            head = np.array(self._find_head(chat), dtype=np.int32)
            suffix = np.array(self._prompts.generation_suffix(chat.variables), dtype=np.int32)
            ends = head, suffix
            self._ends.put(key, ends, head.nbytes + suffix.nbytes + _ENTRY_BYTES).release()
        return ends

    def _find_head(self, chat: Chat) -> list[int]:
        system = chat.messages
        if not all(map(_is_text, system)):
            return []
        users = (Message("user", (TextPart(text),)) for text in ("A", "B"))
        tokens, other_tokens = (
            self._prompts.tokenize(replace(chat, messages=(*system, user)), []) for user in users
        )
        return tokens[: _num_common(np.array(tokens), np.array(other_tokens))]


def _is_text(message: Message) -> bool:
    return all(isinstance(part, TextPart) for part in message.content)


def _num_common(tokens: Tokens, other_tokens: Tokens) -> int:
    length = min(len(tokens), len(other_tokens))
    unequal = np.flatnonzero(tokens[:length] != other_tokens[:length])
    return int(unequal[0]) if len(unequal) else length
