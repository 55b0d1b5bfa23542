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
TOOL_PIECES = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    '{"name": "', '", "arguments": {', '"}}', "}}", '"shape": "', '"color": "', '"count": ',
    '"x": ', '"y": ', '", "', "screenshot", "report",
)  # fmt: skip
"""Added after all else, so that weights from before them can be trained on."""
VOCAB_SIZE = 512 + len(TOOL_PIECES)
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
{%- set first = 0 %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{%- set first = 1 %}
{{- render(messages[0].content) + '\\n' }}
{%- endif %}
{{- 'Tools:\\n' }}
{%- for tool in tools %}
{{- tool.function.name + '(' }}
{%- if tool.function.parameters and tool.function.parameters.properties %}
{{- tool.function.parameters.properties | join(', ') }}
{%- endif %}
{{- ')\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[first:] %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[first:][loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + render(message.content) + '\\n</tool_response>' }}
{%- if loop.last or messages[first:][loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + render(message.content) }}
{%- for tool_call in message.tool_calls or [] %}
{%- if not loop.first or render(message.content) %}{{- '\\n' }}{%- endif %}
{%- set call = tool_call.function or tool_call %}
{%- set tool_call = call %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
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
    room = VOCAB_SIZE - len(SPECIALS) - len(TOOL_PIECES) - len(pieces)
    pieces += frequent_words(texts, room)
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return with_tool_pieces(tokenizer)


def with_tool_pieces(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` with TOOL_PIECES, which it may have or not."""
    pieces = [AddedToken(text, special=False, normalized=False) for text in TOOL_PIECES]
    tokenizer.add_tokens(pieces)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} entries")
    return tokenizer
