"""Inputs to embed: their conversation, after the prompt of their type, and their cache key."""

from __future__ import annotations

import hashlib

import numpy as np

from vlm_server.interfaces import PreparedPrompt
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.prompt.template.chat import Chat
from vlm_server.protocol import Message, Pooling, Submit, TextPart

_INPUT_TYPE = "input_type"
"""The variable by which templates of ours know the type of an input."""


def embedding_chat(spec: ModelSpec, submit: Submit, pooling: Pooling) -> Chat:
    """The conversation of an input, with its prompt as the system's message if it has none.

    A template without turns writes that before the text.
    """
    messages = submit.messages
    instruction = _instruction(spec, pooling)
    if instruction and messages[0].role != "system":
        system = Message("system", (TextPart(instruction),), param=messages[0].param)
        messages = (system, *messages)
    variables = {_INPUT_TYPE: pooling.input_type} if pooling.input_type else {}
    return Chat(messages, variables=variables)


def _instruction(spec: ModelSpec, pooling: Pooling) -> str:
    assert spec.vectors is not None
    default = spec.vectors.default_prompt
    return pooling.instruction or spec.vectors.prompts.get(pooling.input_type, default)


def vector_key(prompt: PreparedPrompt) -> str:
    """SHA-256 in hex over all that the vectors of a prompt depend on, and its cache salt.

    The tokens, and for those of media their place and the hash of the media.
    """
    digest = hashlib.sha256(prompt.cache_salt.encode())
    for span in prompt.spans:
        digest.update(f"\0{span.start},{span.end},{span.mm_hash}".encode())
    digest.update(b"\0" + np.ascontiguousarray(prompt.token_ids, dtype="<i4").tobytes())
    return digest.hexdigest()
