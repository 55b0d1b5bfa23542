"""Pieces joined are the text of all ids, and no character is ever split."""

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from vlm_server.engine.output.detokenizer import Detokenizer, decode_logprobs
from vlm_server.engine.output.pieces import Marks
from vlm_server.interfaces import TokenLogprobs

SPECIALS = ("<|end|>", "<|box|>")
CORPUS = [
    "the quick brown fox, the lazy dog",
    "größer über €uro €uro 😀😀 日本語 日本",
    "  a  b\n\n",
]


@cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE with a few merges, some of them inside characters."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 3, trainer)
    bpe.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return bpe


def byte_id(byte: int) -> int:
    """The token of one byte: byte-level tokenizers write bytes as printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    character = chr(byte) if byte in printable else chr(256 + others.index(byte))
    found = tokenizer().token_to_id(character)
    assert found is not None
    return found


def special_id(text: str) -> int:
    return next(i for i, t in tokenizer().get_added_tokens_decoder().items() if t.content == text)


def pieces_of(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer())
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


IDS = st.integers(0, 310)
"""Those above 301 are no tokens."""


@given(st.lists(IDS, max_size=60))
@example([byte_id(b) for b in (*[0xFF] * 8, *"€".encode())])
@example([byte_id(b) for b in (*[0xFF] * 6, *"😀".encode())])
@example([byte_id(b) for b in (*[0xE2] * 12, *"€".encode())])
@example([*[special_id("<|box|>")] * 12, *map(byte_id, "€".encode())])
def test_joined_pieces_equal_decoded_ids(ids: list[int]):
    assert "".join(pieces_of(ids)) == tokenizer().decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40).filter(lambda text: "\ufffd" not in text), st.booleans())
def test_pieces_of_valid_text_never_split_character(text: str, as_bytes: bool):
    ids = [byte_id(b) for b in text.encode()] if as_bytes else tokenizer().encode(text).ids
    assert not [piece for piece in pieces_of(ids) if "\ufffd" in piece]


@given(st.lists(IDS, max_size=60))
@example([*map(byte_id, "€".encode()[:2]), special_id("<|box|>"), byte_id(ord("a"))])
@example([special_id("<|box|>")] * 12)
def test_control_tokens_have_text_if_requested(ids: list[int]):
    detokenizer = Detokenizer(tokenizer(), with_control=True)
    text, controls = "", 0
    for token_id in ids:
        piece = detokenizer.push(token_id)
        text += piece
        control = piece[len(piece) - detokenizer.num_control :]
        assert not control or control == tokenizer().id_to_token(token_id)
        controls += bool(control)
    assert text + detokenizer.flush() == tokenizer().decode(ids, skip_special_tokens=False)
    assert detokenizer.num_control == 0
    assert controls == sum(token_id in map(special_id, SPECIALS) for token_id in ids)


def test_tokens_without_text_do_not_make_later_character_split():
    ids = [special_id("<|box|>")] * 20 + [byte_id(b) for b in "😀".encode()]
    assert "".join(pieces_of(ids)) == "😀"


def test_complete_text_is_not_held_back():
    detokenizer = Detokenizer(tokenizer())
    ids = tokenizer().encode("the quick brown fox").ids
    assert "".join(detokenizer.push(i) for i in ids) == "the quick brown fox"


def test_character_is_emitted_with_its_last_byte():
    detokenizer = Detokenizer(tokenizer())
    assert [detokenizer.push(byte_id(b)) for b in "😀!".encode()] == ["", "", "", "😀", "!"]


@settings(max_examples=25)
@given(st.lists(st.integers(0x80, 0xFF), min_size=40, max_size=60))
def test_invalid_bytes_do_not_hold_text_back_for_ever(junk: list[int]):
    detokenizer = Detokenizer(tokenizer())
    lag = 0
    for byte in junk:
        lag = 0 if detokenizer.push(byte_id(byte)) else lag + 1
        assert lag <= 10


class CountingTokenizer:
    """The tokenizer, with the number of ids of each call of `decode`."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.lengths.append(len(ids))
        return tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, id: int) -> str | None:
        return tokenizer().id_to_token(id)


def test_decoded_window_stays_short_in_long_answer():
    counting = CountingTokenizer()
    detokenizer = Detokenizer(counting)
    for token_id in tokenizer().encode("the quick brown fox " * 50).ids:
        detokenizer.push(token_id)
    assert max(counting.lengths) <= 3


def test_decoded_window_stays_short_for_tokens_without_text():
    counting = CountingTokenizer()
    detokenizer = Detokenizer(counting)
    for _ in range(200):
        detokenizer.push(special_id("<|box|>"))
    assert max(counting.lengths) <= 20


@pytest.mark.parametrize("stranger", [302, 5000, 2**31 - 1])
def test_unknown_ids_have_no_text_and_keep_short_window(stranger: int):
    counting = CountingTokenizer()
    detokenizer = Detokenizer(counting)
    text = ""
    for token_id in [*[stranger] * 200, *tokenizer().encode("the quick").ids, *[stranger] * 9]:
        text += detokenizer.push(token_id)
    assert text + detokenizer.flush() == "the quick"
    assert max(counting.lengths) <= 3


@pytest.mark.parametrize("text", ["\ufffd", "a\ufffdb", "\ufffd\ufffd"])
def test_replacement_character_in_vocabulary_is_text(text: str):
    assert "".join(pieces_of([byte_id(b) for b in text.encode()])) == text


# ---- log probabilities -------------------------------------------------------------------

TEXT = "a 日本 é😀"


def bytes_of(decoder: Tokenizer, ids: list[int]) -> list[bytes]:
    found = TokenLogprobs(-1.0, tuple((token_id, -2.0) for token_id in ids))
    (entry,) = decode_logprobs(decoder, ids[0], found)
    assert entry.token.utf8 == entry.top[0].utf8
    return [top.utf8 for top in entry.top]


def test_byte_level_tokens_map_to_their_bytes() -> None:
    encoded = TEXT.encode()
    assert bytes_of(tokenizer(), [byte_id(b) for b in encoded]) == [bytes([b]) for b in encoded]
    merged = tokenizer().encode(TEXT).ids
    assert any(0 < len(part) != 1 for part in bytes_of(tokenizer(), merged))
    assert b"".join(bytes_of(tokenizer(), merged)) == encoded


def test_byte_fallback_tokens_map_to_their_bytes() -> None:
    words = {"▁é": 0, "\ufffd": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    bpe = Tokenizer(models.BPE(words, [], byte_fallback=True))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    encoded = "日".encode()
    assert b"".join(bytes_of(bpe, [2 + byte for byte in encoded])) == encoded
    assert bytes_of(bpe, [0, 1]) == [" é".encode(), "\ufffd".encode()]


# ---- pieces --------------------------------------------------------------------------


MARKS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)
TEXTS = st.text("ab<", max_size=12)


def split(marks: Marks, pieces: list[str]) -> list[tuple[str, str]]:
    """(text, the mark after it), of the joined pieces."""
    found, held, text = [], "", ""
    for number, piece in enumerate([*pieces, ""]):
        held += piece
        while True:
            length, mark = marks.find(held, is_last=number == len(pieces))
            text += held[:length]
            held = held[length + len(mark) :]
            if not mark:
                break
            found.append((text, mark))
            text = ""
    assert not held
    return [*found, (text, "")]


@given(MARKS, st.lists(TEXTS, max_size=8))
def test_marks_are_found_for_any_split(texts: list[str], pieces: list[str]):
    marks = Marks(*texts)
    assert split(marks, pieces) == split(marks, ["".join(pieces)])


@given(MARKS, TEXTS)
def test_split_keeps_all_text_and_finds_all_marks(texts: list[str], text: str):
    found = split(Marks(*texts), [text])
    assert "".join(before + mark for before, mark in found) == text
    assert not [mark for mark in texts for before, _ in found if mark in before]


@given(MARKS, TEXTS)
def test_text_is_held_back_only_if_it_may_become_mark(texts: list[str], text: str):
    length, mark = Marks(*texts).find(text)
    held = text[length:]
    assert mark or not held or any(one.startswith(held) and one != held for one in texts)


def test_longer_of_two_possible_marks_is_awaited():
    marks = Marks("<a>", "<a>b")
    assert marks.find("x<a>") == (1, "")
    assert marks.find("x<a>", is_last=True) == (1, "<a>")
    assert marks.find("x<a>c") == (1, "<a>")
    assert marks.find("x<a>b") == (1, "<a>b")


def test_regex_characters_in_marks_are_literal():
    assert Marks("]<]m[>[<t>").find("a]<]m[>[<t>") == (1, "]<]m[>[<t>")
    assert Marks("[T|]").find("a[T") == (1, "")
    assert Marks().find("a<") == (2, "")
