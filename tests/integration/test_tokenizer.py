"""Prompts that are no valid Unicode are refused as client errors."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.integration.harness import Load, ask, prompt_of
from tests.support.image_files import submitted
from tests.support.images import random_image
from vlm_server.errors import InvalidRequest
from vlm_server.prompt.template.chat import Chat
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Message, SamplingParams, Submit, TextPart


def test_lone_surrogate_is_refused_with_its_field(load_tiny: Load):
    prompts = PromptTokenizer(load_tiny("gemma3")[0].spec)
    chat = Chat((Message("user", (TextPart("a\ud800b"),)),))
    with pytest.raises(InvalidRequest) as refused:
        prompts.tokenize(chat, [])
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequest) as refused:
        prompts.tokenize_text("\udfff")
    assert refused.value.param == "prompt"


def test_placeholder_ids_are_detokenized_but_refused_as_prompt(load_tiny: Load):
    loaded, preparer = load_tiny("qwen3_vl")
    ids = tuple(prompt_of(preparer, ask("one", submitted(random_image(1)))).token_ids.tolist())
    submit = Submit("r", (), (), SamplingParams(), prompt=ids, count_only=True)
    assert prompt_of(preparer, submit).text == PromptTokenizer(loaded.spec).text_of(ids)
    with pytest.raises(InvalidRequest, match="stand for images"):
        prompt_of(preparer, structs.replace(submit, count_only=False))
