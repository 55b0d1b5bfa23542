"""Grammars that answers must follow: compiled once per schema, then advanced token by token.

Preparer threads compile. A matcher belongs to one answer and to the thread that samples its tokens.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from typing import Any

import llguidance.numpy
import numpy as np
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from vlm_server.errors import InvalidRequest
from vlm_server.host_model import HostModel
from vlm_server.ports import SCHEMA_PARAM
from vlm_server.prompt.json_grammar import SchemaError, compile_schema, try_schema

logger = logging.getLogger(__name__)

_MAX_GRAMMARS = 64
_CONTROL = "\ufdd0"
"""Begins the names of control tokens; no character, so that no schema has it by chance."""


class Grammars:
    """Compiles schemas for one model, and keeps the grammars used last. Thread-safe."""

    def __init__(self, host: HostModel, timeout_seconds: float) -> None:
        """`timeout_seconds` is what trying a new schema may take."""
        self._timeout_seconds = timeout_seconds
        self._vocabulary_size = host.vocabulary_size
        self._tokenizer = _tokenizer(host)
        self._lock = threading.Lock()
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        """By the exact text of the schema, the least recently used first."""

    def compile(self, schema: str) -> Grammar:
        """The grammar of `schema`. Raises InvalidRequest if it can't be obeyed."""
        with self._lock:
            grammar = self._grammars.get(schema)
        if grammar is None:
            grammar = self._compile(schema)
        with self._lock:
            self._grammars[schema] = grammar
            self._grammars.move_to_end(schema)
            while len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _compile(self, schema: str) -> Grammar:
        if self._tokenizer is None:
            raise InvalidRequest("this model's tokenizer can't be held to JSON", "response_format")
        try:
            try_schema(schema, self._timeout_seconds)
            template = compile_schema(self._tokenizer, schema)
        except SchemaError as error:
            raise InvalidRequest(f"this schema can't be obeyed: {error}", SCHEMA_PARAM) from None
        return Grammar(template, self._tokenizer.vocab_size, self._vocabulary_size)


class Grammar:
    """The `Grammar` of a schema: what an answer may be."""

    def __init__(self, template: LLMatcher, num_known: int, vocabulary_size: int) -> None:
        """`num_known` tokens are the tokenizer's, the first `vocabulary_size` have a logit."""
        self._template = template
        self._num_known = num_known
        self._vocabulary_size = vocabulary_size

    def begin(self) -> AnswerMatcher:
        """A matcher at the beginning of an answer."""
        bits = llguidance.numpy.allocate_token_bitmask(1, self._num_known)
        return AnswerMatcher(self._template.deep_copy(), bits, self._vocabulary_size)


class AnswerMatcher:
    """Follows one answer, token by token. End tokens are allowed where it may end."""

    def __init__(self, matcher: LLMatcher, bits: NDArray[np.int32], vocabulary_size: int) -> None:
        self._matcher = matcher
        self._bits = bits
        self._vocabulary_size = vocabulary_size
        self.is_stuck = False
        """Whether the answer can't go on: its grammar is too complex, or a token was wrong."""

    def advance(self, token_id: int) -> None:
        """`token_id` was drawn."""
        self._matcher.consume_token(token_id)

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,): which tokens may come next; none when it is stuck."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            self._bits[:] = 0
        bits = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")
        allowed = bits[: self._vocabulary_size].view(np.bool_)
        self.is_stuck = not allowed.any()
        return allowed


def _tokenizer(host: HostModel) -> LLTokenizer | None:
    """The model's vocabulary as llguidance takes it, whether it or the logits are wider.

    None if it can't be read, or has no end: such a model is served without JSON.
    """
    num_tokens = max(host.backend.get_vocab().values()) + 1
    drawable = range(min(num_tokens, host.vocabulary_size))
    try:
        return LLTokenizer(
            _literal(host.backend),
            n_vocab=max(num_tokens, host.vocabulary_size),
            eos_token=[token_id for token_id in drawable if token_id in host.eos_token_ids],
        )
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # Rust's, which is no Exception
        if not (is_panic or isinstance(error, Exception)):
            raise
        logger.warning("answers can't be held to JSON: %s", error)
        return None


def _literal(tokenizer: tokenizers.Tokenizer) -> str:
    """`tokenizer` as JSON, changed so that it takes every text as it stands.

    llguidance tokenizes what a schema leaves no choice about. Control tokens are renamed, as such
    text might hold their names, and normal forms are dropped, as they would write other bytes.
    """
    described = json.loads(tokenizer.to_str())
    described |= {"padding": None, "truncation": None, "post_processor": None}
    described["normalizer"] = _spelling(described["normalizer"])
    added, model = described["added_tokens"], described["model"]
    names = {each["content"]: f"{_CONTROL}{each['id']}" for each in added if each["special"]}
    for each in added:
        each["content"] = names.get(each["content"], each["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if unknown := model.get("unk_token"):
        model["unk_token"] = names.get(unknown, unknown)
    return json.dumps(described)


def _spelling(normalizer: dict[str, Any] | None) -> dict[str, Any]:
    """What of `normalizer` says how the vocabulary spells blanks."""
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    kept = [step for step in steps if step["type"] in ("Prepend", "Replace")]
    return {"type": "Sequence", "normalizers": kept}
