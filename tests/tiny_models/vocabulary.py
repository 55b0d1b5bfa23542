"""The tokenizer that every tiny model shares: bytes, a few English merges, a family's specials.

Knows text and token ids; knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

MERGES = 112
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = """\
Describe this image in one sentence. What changed in the picture since the last step?
You are a helpful assistant that looks at screenshots. Answer the question with a short text.
The user shows a new picture at every turn and the assistant says what is there.
Which colour is the shape on the left? The red square is above the blue circle.
How many buttons are on the screen? There are three of them, and the second one is green.
system user assistant model System User Assistant Step Picture Describe image text
Click the button in the window, then wait until the page has changed. Read the number.
"""
_OFTEN = 99
NEWLINES = "\n\n"  # one token, as in real vocabularies: text next to an image may join it


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer; `specials` take the ids after its bytes and merges.

    `bos`, if given, is put before every text that is encoded with special tokens. `words` are
    tokens of their own.
    """

    specials: tuple[str, ...]
    bos: str | None = None
    words: tuple[str, ...] = ()
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer", _tokenizer(self.specials, self.bos, self.words))

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def id(self, token: str) -> int:
        """The id of a token; raises KeyError for a text that is not one token."""
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return int(found)

    def quiet_ids(self) -> list[int]:
        """Ids a random model shall never choose: specials, and bytes that are no text alone.

        Without them replies run to their limit, and what is decoded encodes again.
        """
        return [i for i in range(len(self)) if not _is_plain(self._text(i))]

    def to_json(self) -> str:
        """The contents of tokenizer.json."""
        loaded: dict[str, Any] = json.loads(self.tokenizer.to_str())
        return json.dumps(loaded, indent=1, ensure_ascii=False) + "\n"

    def _text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=True))


def _is_plain(text: str) -> bool:
    return text != "" and text.isascii() and (text.isprintable() or text == "\n")


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _tokenizer(specials: Sequence[str], bos: str | None, words: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS.splitlines(), *[NEWLINES] * 9, *words * _OFTEN], trainer)
    if tokenizer.get_vocab_size() != len(alphabet) + MERGES:
        raise ValueError(f"the corpus gave only {tokenizer.get_vocab_size()} entries")
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in specials]
    )
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer
