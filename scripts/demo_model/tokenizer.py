"""The byte-level tokenizer: 256 bytes, whole frequent words, and Qwen's special tokens.

A word that is not in the vocabulary is spelled byte by byte, digits always singly, so a text
that is read from a picture comes out one character at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 512
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = """\
{%- macro render(content) -%}
{%- if content is string %}{{- content }}
{%- elif content is not none %}
{%- for part in content %}
{%- if part.type in ('image', 'image_url', 'input_image')
    or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type in ('video', 'video_url', 'input_video') or 'video' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro -%}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _byte_letters() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def frequent_words(texts: Iterable[str], count: int) -> list[str]:
    """The pieces worth a token: those that save most, weighing frequency by length.

    Lower-case pieces without a leading space stay spelled: they are what answers are made of.
    """
    splitter = _splitter()
    seen: Counter[str] = Counter()
    for text in texts:
        seen.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    allowed = {
        piece: number * (len(piece) - 1)
        for piece, number in seen.items()
        if len(piece) > 1 and (piece[0] == "Ġ" or (piece[0].isupper() and piece[1].islower()))
    }
    return [piece for piece, _ in Counter(allowed).most_common(count)]


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly VOCAB_SIZE entries, its words chosen from `texts`."""
    pieces = [*_byte_letters(), *ROLES]
    room = VOCAB_SIZE - len(SPECIALS) - len(pieces)
    pieces += frequent_words(texts, room)
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} entries")
    return tokenizer
