"""Tokens of complete answers, by the name of the API key and the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vlm_server.protocol import Usage

MAX_KEYS = 100
OTHER = "(other)"
"""The label of all keys after the first `MAX_KEYS`: counters must not fall when keys change."""


class KeyUsage:
    """Counts tokens; bounded, whatever the file of keys lists while the daemon runs."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._names: set[str] = set()
        self._prompt_tokens: Counter[tuple[str, str]] = Counter()
        self._generation_tokens: Counter[tuple[str, str]] = Counter()

    def add(self, key_name: str | None, model: str, usage: Usage) -> None:
        """Count an answer; `key_name` is the name of its key, never the key."""
        if not usage.prompt_tokens:
            return  # it did not end, or generates nothing
        name = key_name or ""
        if name not in self._names:
            if len(self._names) >= self._max_keys:
                name = OTHER
            else:
                self._names.add(name)
        self._prompt_tokens[name, model] += usage.prompt_tokens
        self._generation_tokens[name, model] += usage.completion_tokens

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        """(key, model, prompt tokens, generated tokens)."""
        for (name, model), prompt_tokens in self._prompt_tokens.items():
            yield name, model, prompt_tokens, self._generation_tokens[name, model]
