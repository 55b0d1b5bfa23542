"""Inputs to embed or to score: their conversation, and the key of the result in its cache."""

from __future__ import annotations

import hashlib

import numpy as np

from vlm_server.interfaces import PreparedPrompt
from vlm_server.interfaces.model_spec import ModelSpec, ScoreSpec
from vlm_server.prompt.template.chat import Chat
from vlm_server.protocol import Message, Pooling, Submit, TextPart

_INPUT_TYPE = "input_type"
"""The variable by which templates of ours know the type of an input."""


def pooling_chat(spec: ModelSpec, submit: Submit, pooling: Pooling) -> Chat:
    """The conversation of an input: to embed, or the question whether it suits a query."""
    if spec.scores is not None:
        return _question(spec.scores, submit, pooling)
    return _after_prompt(spec, submit, pooling)


def texts_of(submit: Submit) -> tuple[str, str]:
    """The query and the document of a pair of texts."""
    query, document = (
        "".join(part.text for part in message.content if isinstance(part, TextPart))
        for message in submit.messages
    )
    return query, document


def _question(spec: ScoreSpec, submit: Submit, pooling: Pooling) -> Chat:
    query, document = submit.messages
    instruction = pooling.instruction or spec.instruction
    content = (
        TextPart(spec.before_instruction + instruction + spec.before_query),
        *query.content,
        TextPart(spec.before_document),
        *document.content,
    )
    system = Message("system", (TextPart(spec.system),), param=document.param)
    return Chat((system, Message("user", content, param=document.param)))


def _after_prompt(spec: ModelSpec, submit: Submit, pooling: Pooling) -> Chat:
    """An input with its prompt as the system's message, if it has none.

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
    digest = hashlib.sha256(prompt.prefix_salt.encode())
    if prompt.token_types is not None:
        digest.update(b"\0" + np.ascontiguousarray(prompt.token_types, dtype="<i4").tobytes())
    for span in prompt.spans:
        digest.update(f"\0{span.start},{span.end},{span.mm_hash}".encode())
    digest.update(b"\0" + np.ascontiguousarray(prompt.token_ids, dtype="<i4").tobytes())
    return digest.hexdigest()
