"""Prompts that are no valid Unicode are refused as client errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from tokenizers import Tokenizer, normalizers

from tests.integration.decisions import without_case
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


def test_options_that_tokenizer_makes_equal_are_refused(load_tiny: Load):
    """Each would have the probability of both."""
    spec = load_tiny("qwen3_vl")[0].spec
    options = ("red", "\u00e9", "e\u0301")
    assert len(PromptTokenizer(spec).tokenize_options(options, [1], "q")) == 3
    normalizing = Tokenizer.from_str(spec.backend.to_str())
    normalizing.normalizer = normalizers.NFC()
    prompts = PromptTokenizer(replace(spec, backend=normalizing))
    with pytest.raises(InvalidRequest, match="Options 1 and 2"):
        prompts.tokenize_options(options, [1], "q")


def test_spellings_of_one_option_may_be_equal(load_tiny: Load):
    """But not to those of another."""
    spec = load_tiny("qwen3_vl")[0].spec
    prompts = PromptTokenizer(replace(spec, backend=without_case(spec)))
    yes, same_yes, no, same_no = prompts.tokenize_options(("yes", "Yes", "no", "No"), [1], "q", 2)
    assert yes == same_yes != no == same_no
    with pytest.raises(InvalidRequest, match="Options 0 and 1"):
        prompts.tokenize_options(("yes", "Yes", "no", "No"), [1], "q")
    with pytest.raises(InvalidRequest, match="Options 1 and 2"):
        prompts.tokenize_options(("no", "yes", "Yes", "maybe"), [1], "q", 2)
