"""What a worker knows of conversations: KV of their beginnings, and features of pictures.

Bounded in bytes, as the daemon's are; the least recently used is evicted first, and of a
conversation its end before its beginning. Conversations share nothing but the head of their first
prompt.
"""

from __future__ import annotations

from collections import OrderedDict


class PrefixStore:
    """How many tokens of each conversation are stored, in the segments in which they came."""

    def __init__(self, max_tokens: float, head_tokens: int) -> None:
        """All prompts begin with `head_tokens`, which stay once anybody has stored them."""
        self._max_tokens = max_tokens
        self._head_tokens = head_tokens
        self._segments: OrderedDict[str, list[int]] = OrderedDict()
        self._tokens = 0
        self.evicted_tokens = 0

    def match(self, conversation: str, prompt_tokens: int) -> int:
        """Cached tokens of a prompt; its last one is always computed."""
        segments = self._segments.get(conversation)
        if segments:
            self._segments.move_to_end(conversation)
        known = sum(segments) if segments else 0
        return min(prompt_tokens - 1, known or (self._head_tokens if self._tokens else 0))

    def store(self, conversation: str, num_tokens: int) -> None:
        """The first `num_tokens` of a conversation were computed."""
        segments = self._segments.setdefault(conversation, [])
        self._segments.move_to_end(conversation)
        added = num_tokens - sum(segments)
        if added > 0:
            segments.append(added)
            self._tokens += added
        while self._tokens > self._max_tokens and self._segments:
            self._evict()

    def _evict(self) -> None:
        conversation, segments = next(iter(self._segments.items()))
        dropped = segments.pop()
        self._tokens -= dropped
        self.evicted_tokens += dropped
        if not segments:
            del self._segments[conversation]


class FeatureStore:
    """Which pictures' features are stored, as tokens."""

    def __init__(self, max_tokens: float) -> None:
        self._max_tokens = max_tokens
        self._pictures: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def __contains__(self, picture: str) -> bool:
        found = picture in self._pictures
        if found:
            self._pictures.move_to_end(picture)
        return found

    def store(self, picture: str, tokens: int) -> None:
        if picture not in self:
            self._pictures[picture] = tokens
            self._tokens += tokens
        while self._tokens > self._max_tokens and self._pictures:
            _, dropped = self._pictures.popitem(last=False)
            self._tokens -= dropped
