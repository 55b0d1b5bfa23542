"""Prompts that are no Unicode text are the client's fault, however they came about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vlm_server.errors import InvalidRequest
from vlm_server.prompt.chat import Chat
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Message, TextPart
from vlm_server.runner.model.load import LoadedModel

Load = Callable[[str], tuple[LoadedModel, MultimodalPreparer]]


def test_a_lone_surrogate_is_refused_by_name(load_tiny: Load):
    prompts = PromptTokenizer(load_tiny("gemma3")[0].host)
    chat = Chat((Message("user", (TextPart("a\ud800b"),)),))
    with pytest.raises(InvalidRequest) as refused:
        prompts.tokenize(chat, [])
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequest) as refused:
        prompts.tokenize_text("\udfff")
    assert refused.value.param == "prompt"
