"""Grammars that answers must follow: one for each constraint, kept for requests that come after.

Those that can't be compiled are remembered too: trying one takes seconds. API keys share neither,
or timing would tell one client what another asked.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from functools import partial

from vlm_server.cache.lru import LruCache
from vlm_server.errors import InvalidRequest
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.grammar import vocabulary
from vlm_server.prompt.grammar.constraint import Constraint, encode
from vlm_server.prompt.grammar.server import (
    Grammar,
    GrammarLimits,
    GrammarServer,
    GrammarsUnavailable,
)
from vlm_server.prompt.grammar.wire import SchemaError

_MAX_REFUSALS = 4096
_REFUSAL_SECONDS = 600.0
"""Then it is tried again: the machine may have been too busy."""


class Grammars:
    """Compiles constraints for one model, and keeps the grammars used last. Thread-safe."""

    def __init__(self, host: ModelSpec, limits: GrammarLimits, cache_bytes: int) -> None:
        """`cache_bytes`: what the processes of kept grammars may take for themselves."""
        self._server = GrammarServer(
            partial(vocabulary.describe, host), host.vocabulary_size, limits
        )
        self._kept = LruCache[Grammar]("grammar", cache_bytes)
        self._refusals = _Refusals()

    def warm_up(self) -> None:
        """Let the first schema find all ready; returns at once."""
        self._server.warm_up()

    def compile(self, constraint: Constraint, salt: str, cancellation: Cancellation) -> Grammar:
        """The grammar of `constraint`. Raises InvalidRequest if it can't be obeyed.

        InternalError is for what is no fault of its own, such as being cancelled.
        """
        key = hashlib.sha256(salt.encode() + b"\0" + encode(constraint)).hexdigest()
        grammar = self._kept.get(key)
        if grammar is not None:
            if grammar.is_alive:
                return grammar
            self._kept.discard(key)
        reason = self._refusals.get(key)
        if reason is not None:
            raise constraint.refusal(reason)
        try:
            grammar = self._server.compile(constraint, cancellation)
        except GrammarsUnavailable:
            message = "this model's tokenizer can't be held to JSON"
            raise InvalidRequest(message, constraint.param.partition(".")[0]) from None
        except SchemaError as error:
            self._refusals.put(key, str(error))
            raise constraint.refusal(str(error)) from None
        self._kept.put(key, grammar, grammar.size_bytes).release()
        return grammar

    def close(self) -> None:
        """End the process that compiles."""
        self._server.close()


class _Refusals:
    """Why schemas were refused, for a while. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """By key, the oldest first, each with its time."""

    def get(self, key: str) -> str | None:
        with self._lock:
            refused_at, reason = self._reasons.get(key, (0.0, None))
            is_fresh = time.monotonic() < refused_at + _REFUSAL_SECONDS
            return reason if is_fresh else None

    def put(self, key: str, reason: str) -> None:
        with self._lock:
            self._reasons.pop(key, None)
            self._reasons[key] = time.monotonic(), reason
            while len(self._reasons) > _MAX_REFUSALS:
                self._reasons.popitem(last=False)
