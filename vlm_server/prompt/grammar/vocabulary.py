"""A model's tokenizer as llguidance takes it."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from vlm_server.interfaces.model_spec import ModelSpec

_CONTROL = "\ufdd0"
"""Begins the names of control tokens; no character, so that no schema has it by chance."""


def describe(host: ModelSpec) -> dict[str, Any]:
    """What `process` needs to know, whether vocabulary or logits are wider."""
    num_tokens = max(host.backend.get_vocab().values()) + 1
    drawable = range(min(num_tokens, host.vocabulary_size))
    return {
        "tokenizer": _literal(host.backend),
        "size": max(num_tokens, host.vocabulary_size),
        "ends": [token_id for token_id in drawable if token_id in host.eos_token_ids],
    }


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
