"""A cache of compiled grammars and of refusals, by API key and constraint.

They are not shared between API keys: timing would reveal other clients' schemas.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from functools import partial
from typing import Any

import tokenizers

from vlm_server.cache.lru import LruCache
from vlm_server.errors import InvalidRequest
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.grammar.constraints import Constraint, encode
from vlm_server.prompt.grammar.forked_process import SchemaError
from vlm_server.prompt.grammar.grammar_client import (
    CompiledGrammar,
    GrammarClient,
    GrammarLimits,
    GrammarsUnavailable,
)

_CONTROL = "\ufdd0"
"""Prefix of renamed control tokens: a noncharacter, so that no schema has it by chance."""
_REFUSAL_BYTES, _REFUSAL_CACHE_BYTES = 500, 2 << 20
_REFUSAL_SECONDS = 600.0
"""Time for which a refusal is kept: the machine may have been too busy."""


class Grammars:
    """Compiles constraints for one model, and keeps the grammars used last. Thread-safe."""

    def __init__(self, spec: ModelSpec, limits: GrammarLimits, cache_bytes: int) -> None:
        """cache_bytes: memory of the processes of kept grammars, beyond what they share."""
        self._server = GrammarClient(partial(_describe, spec), spec.vocabulary_size, limits)
        self._kept = LruCache[CompiledGrammar]("grammar", cache_bytes)
        self._refusals = LruCache[tuple[float, str]]("refused schemas", _REFUSAL_CACHE_BYTES)
        """The time and reason of each refusal."""

    def warm_up(self) -> None:
        """Start the grammar process in the background."""
        self._server.warm_up()

    def compile(
        self, constraint: Constraint, salt: str, cancellation: Cancellation
    ) -> CompiledGrammar:
        """The grammar of `constraint`. Raises InvalidRequest if it can't be obeyed, and
        InternalError for other failures and when cancelled."""
        key = hashlib.sha256(salt.encode() + b"\0" + encode(constraint)).hexdigest()
        grammar = self._kept.get(key)
        if grammar is not None:
            if grammar.is_alive:
                return grammar
            self._kept.discard(key)
        refused_at, reason = self._refusals.get(key) or (-math.inf, "")
        if time.monotonic() < refused_at + _REFUSAL_SECONDS:
            raise constraint.refusal(reason)
        try:
            grammar = self._server.compile(constraint, cancellation)
        except GrammarsUnavailable:
            message = "this model's tokenizer can't be held to JSON"
            raise InvalidRequest(message, constraint.param.partition(".")[0]) from None
        except SchemaError as error:
            refusal = time.monotonic(), str(error)
            self._refusals.put(key, refusal, _REFUSAL_BYTES).release()
            raise constraint.refusal(str(error)) from None
        self._kept.put(key, grammar, grammar.size_bytes).release()
        return grammar

    def close(self) -> None:
        """End the grammar process."""
        self._server.close()


def _describe(spec: ModelSpec) -> dict[str, Any]:
    """The start message of `grammar_process`: tokenizer, width of its masks, end tokens."""
    num_tokens = max(spec.backend.get_vocab().values()) + 1
    sampleable = range(min(num_tokens, spec.vocabulary_size))
    return {
        "tokenizer": _literal(spec.backend),
        "size": max(num_tokens, spec.vocabulary_size),
        "ends": [token_id for token_id in sampleable if token_id in spec.eos_token_ids],
    }


def _literal(tokenizer: tokenizers.Tokenizer) -> str:
    """`tokenizer` as JSON, changed so that it encodes every text literally.

    Control tokens are renamed, since a schema's text might hold their names; normalizers that
    change bytes are dropped.
    """
    described = json.loads(tokenizer.to_str())
    described |= {"padding": None, "truncation": None, "post_processor": None}
    described["normalizer"] = _spelling(described["normalizer"])
    added, model = described["added_tokens"], described["model"]
    names = {token["content"]: f"{_CONTROL}{token['id']}" for token in added if token["special"]}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if unknown := model.get("unk_token"):
        model["unk_token"] = names.get(unknown, unknown)
    return json.dumps(described)


def _spelling(normalizer: dict[str, Any] | None) -> dict[str, Any]:
    """The steps of `normalizer` that write blanks as the vocabulary does."""
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    spelling_steps = [step for step in steps if step["type"] in ("Prepend", "Replace")]
    return {"type": "Sequence", "normalizers": spelling_steps}
