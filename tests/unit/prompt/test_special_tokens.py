"""Names of control tokens in a client's text stay text, also if nested or revealed by removal."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.processor_time import processor_time
from vlm_server.prompt.special_tokens import SpecialTokens

NAMES = ["<|end|>", "<|", "|>", "<a>", ">b<", "<a>b<c>", "<|end|>x<|end|>", "[IMG]", "[[IMG]]"]
NAMES += ["aXa", "abab", "<\uff5cé\uff5c>", "\n##\n"]
"""Names that share beginnings or ends, contain each other, or overlap themselves."""
PLAIN = ["<think>", "</think>"]
MARK = "\ue0ff"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    backend.add_tokens([AddedToken(name, special=False) for name in PLAIN])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def special(tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
    return SpecialTokens(tokenizer, ["[IMG]"])


def texts(seed: int, count: int) -> list[str]:
    """Random nestings: names split by other names, or by pieces of them."""
    rng = random.Random(seed)

    def piece(depth: int) -> str:
        name = rng.choice(NAMES + PLAIN + ["x", "<", ">", "|", "é", " ", "end", "\n"])
        if depth and rng.random() < 0.6:
            place = rng.randint(0, len(name))
            return name[:place] + piece(depth - 1) + name[place:]
        if rng.random() < 0.3:
            return name[rng.randint(0, len(name)) :]
        return name

    return ["".join(piece(3) for _ in range(rng.randint(1, 6))) for _ in range(count)]


def controls(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    added = tokenizer.added_tokens_decoder
    return [added[i].content for i in ids if i in added and added[i].special]


@pytest.mark.parametrize("seed", range(20))
def test_nested_control_token_names_stay_text(
    tokenizer: PreTrainedTokenizerFast, special: SpecialTokens, seed: int
):
    for text in texts(seed, 200):
        for disarmed in (special.disarm(text, MARK), special.disarm_beginnings(text, MARK)):
            assert disarmed.replace(MARK, "") == text
            ids = tokenizer.encode(disarmed, add_special_tokens=False)
            cleaned = special.remove_marks(ids, MARK)
            assert controls(tokenizer, cleaned) == [], text
            assert tokenizer.decode(cleaned) == text


def test_special_token_scan_is_fast_with_thousand_names(tokenizer: PreTrainedTokenizerFast):
    """Mistral has as many; alternatives in a regular expression are tried one by one."""
    names = [f"<SPECIAL_{i}>" for i in range(1000)] + ["<s>", "</s>", "[INST]", "[IMG]", "[/INST]"]
    special = SpecialTokens(tokenizer, names)
    for text in ("<" * 1_000_000, "<SPECIAL_9" * 100_000, "What shape is this? [" * 50_000):
        with processor_time() as measured:
            assert special.count(text) == 0
            assert special.disarm(text, MARK) == text
        assert measured.seconds < 1.0
    assert special.disarm("<SPECIAL_12><SPECIAL_1>[/INST]</s", MARK) == (
        f"<{MARK}SPECIAL_12><{MARK}SPECIAL_1>[{MARK}/INST]</s"
    )


@pytest.mark.parametrize("seed", range(20))
def test_removed_text_never_forms_control_tokens(
    tokenizer: PreTrainedTokenizerFast, special: SpecialTokens, seed: int
):
    """Marked beginnings can't become whole names, whatever text between is removed."""
    rng = random.Random(seed)
    for text in texts(100 + seed, 100):
        taken = rng.choice([*PLAIN, "x", "end", " ", "<think>x</think>"])
        left = special.disarm_beginnings(text, MARK).replace(taken, "")
        ids = special.remove_marks(tokenizer.encode(left, add_special_tokens=False), MARK)
        assert controls(tokenizer, ids) == [], text


def test_overlapping_special_tokens_are_all_counted(special: SpecialTokens):
    assert special.count("<a>b<c>") == 2, "<a> and >b<"
    assert special.count("no < | >") == 0
    assert special.count(special.without_beginnings("x[[IMG]]<a>")) == 0
    assert special.may_begin_in("x[[IMG")
