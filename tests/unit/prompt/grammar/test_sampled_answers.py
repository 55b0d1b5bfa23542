"""Answers sampled at random from the tokens that a grammar allows conform to its schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.whole_run import examples
from vlm_server.errors import InvalidRequest
from vlm_server.interfaces import AnswerMatcher, Grammar
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.grammar.constraints import Schema
from vlm_server.prompt.grammar.grammar_cache import Grammars
from vlm_server.prompt.grammar.grammar_client import GrammarLimits
from vlm_server.settings import EngineSettings

TEXT = """\
The colour of the red square is "red": [true, false, null], {"count": 12, "label": "circle"}.
Which shapes are there on the left? "Three", "four": they have been counted, and their names too.
"""
START, END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class FakeModelSpec:
    """The fields of a `ModelSpec` that `Grammars` reads."""

    backend: tokenizers.Tokenizer
    eos_token_ids: frozenset[int]
    vocabulary_size: int
    tool_parser: None = None


def merged_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer like Qwen's: bytes, a hundred merges and two control tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + 100, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([START, END])
    return tokenizer


def host_of(backend: tokenizers.Tokenizer, end: str) -> FakeModelSpec:
    return FakeModelSpec(backend, frozenset({backend.token_to_id(end)}), backend.get_vocab_size())


HOST = host_of(merged_tokenizer(), END)


def new_grammars(host: Any) -> Grammars:
    """Grammars with generous limits: the machine may be busy."""
    return Grammars(
        host, GrammarLimits(60.0, EngineSettings().max_schema_memory_bytes, 60.0), 128 << 20
    )


Compile = Callable[[FakeModelSpec, Any], Grammar]


@pytest.fixture(scope="module")
def grammar_of() -> Iterator[Compile]:
    """A function that compiles a schema for a model."""
    grammars_of_hosts = dict[int, tuple[FakeModelSpec, Grammars]]()

    def compiled(host: FakeModelSpec, schema: Any) -> Grammar:
        _, grammars = grammars_of_hosts.setdefault(id(host), (host, new_grammars(host)))
        return grammars.compile(Schema(json.dumps(schema)), "", Cancellation())

    yield compiled
    for _, grammars in grammars_of_hosts.values():
        grammars.close()


def allowed(matcher: AnswerMatcher) -> NDArray[np.bool_]:
    """The mask of the next token, once it is computed."""
    assert matcher.wait(30)
    return matcher.allowed()


def begin(grammar: Grammar) -> AnswerMatcher:
    (matcher,) = grammar.begin(1)
    return matcher


def sampled_text(host: FakeModelSpec, grammar: Grammar, rng: np.random.Generator) -> str:
    """A random answer; after 60 tokens, tokens that close something are preferred."""
    matcher, tokens = begin(grammar), list[int]()
    ends = host.eos_token_ids
    while not tokens or tokens[-1] not in ends:
        assert len(tokens) < 2000, "no end"
        allowed_ids = np.flatnonzero(allowed(matcher))
        assert len(allowed_ids)
        hurried = [
            i for i in allowed_ids if i in ends or host.backend.decode([i]) in ('"', "}", "]")
        ]
        tokens.append(int(rng.choice(hurried if hurried and len(tokens) > 60 else allowed_ids)))
        matcher.advance([tokens[-1]])
    matcher.close()
    return host.backend.decode(tokens, skip_special_tokens=True)


def test_complete_answer_allows_only_end_tokens(grammar_of: Compile):
    matcher = begin(grammar_of(HOST, {"const": 5}))
    first = np.flatnonzero(allowed(matcher))
    assert [HOST.backend.decode([i]) for i in first] == ["5"]
    matcher.advance([int(first[0])])
    assert set(np.flatnonzero(allowed(matcher))) <= HOST.eos_token_ids
    assert matcher.error is None


def test_grammar_never_allows_control_tokens_inside_strings(grammar_of: Compile):
    matcher = begin(grammar_of(HOST, {"type": "string"}))
    matcher.advance([HOST.backend.token_to_id('"')])
    inside = np.flatnonzero(allowed(matcher)).tolist()
    assert len(inside) > 100
    special = HOST.backend.get_added_tokens_decoder()
    assert not [i for i in inside if i in special or i in HOST.eos_token_ids]


@pytest.mark.parametrize("change", [-5, 0, 70])
def test_grammar_mask_has_size_of_logits(grammar_of: Compile, change: int):
    num_tokens = len(HOST.backend.get_vocab())
    size = num_tokens + change
    end = min(size, num_tokens) - 1
    ends = frozenset({end, num_tokens, 2**40, -1})
    grammar = grammar_of(replace(HOST, vocabulary_size=size, eos_token_ids=ends), {"const": "é"})
    matcher, tokens = begin(grammar), list[int]()
    while not tokens or tokens[-1] != end:
        mask = allowed(matcher)
        assert mask.shape == (size,)
        tokens.append(int(np.flatnonzero(mask)[-1]))
        matcher.advance([tokens[-1]])
    assert HOST.backend.decode(tokens[:-1]) == '"é"'


@pytest.mark.parametrize("text", ["e\u0301 \u2126 ", "<|im_end|>", "<|im_start|>\ufb01"])
def test_schema_constants_are_not_normalized_by_tokenizer(grammar_of: Compile, text: str):
    """Also if the tokenizer would normalize characters, or parse control tokens."""
    normalizing = tokenizers.Tokenizer.from_str(HOST.backend.to_str())
    normalizing.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])
    changed = replace(HOST, backend=normalizing)
    rng = np.random.default_rng(0)
    for schema in ({"const": text}, {"enum": [f"{text}a", f"{text}b"]}):
        jsonschema.validate(
            json.loads(sampled_text(changed, grammar_of(changed, schema), rng)), schema
        )


def sentencepiece_tokenizer(*more_pieces: str) -> tokenizers.Tokenizer:
    """A tokenizer like Llama's and Gemma's: blanks as \u2581, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += [
        *'\u2581abcdefghijklmnopqrstuvwxyz"{}[]:,0123456789<>/',
        "\u2581a",
        '":',
        '\u2581"',
        *more_pieces,
    ]
    merges = [("\u2581", "a"), ('"', ":"), ("\u2581", '"')]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def wordpiece_tokenizer() -> tokenizers.Tokenizer:
    model = models.WordPiece(vocab={"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.mark.parametrize("seed", range(5))
def test_grammar_handles_sentencepiece_bytes_and_blanks(grammar_of: Compile, seed: int):
    backend = sentencepiece_tokenizer()
    host = host_of(backend, "</s>")
    text = {"const": {"a ab": ["</s>\u00e9<s>", " a"]}}
    schema = {"type": "array", "prefixItems": [text, {"type": "string"}], "minItems": 2}
    rng = np.random.default_rng(seed)
    jsonschema.validate(json.loads(sampled_text(host, grammar_of(host, schema), rng)), schema)


def test_token_outside_grammar_leaves_empty_mask_and_error(grammar_of: Compile):
    matcher = begin(grammar_of(HOST, {"type": "null"}))
    matcher.advance([HOST.backend.token_to_id("x")])
    assert not allowed(matcher).any()
    assert matcher.error is not None
    assert "too complex to follow" in matcher.error.message


def test_matchers_of_one_grammar_are_independent(grammar_of: Compile):
    grammar = grammar_of(HOST, {"enum": ["a", "b"]})
    first, second = grammar.begin(2)
    first.advance([HOST.backend.token_to_id('"')])
    assert (allowed(first) != allowed(second)).any()
    assert (allowed(second) == allowed(begin(grammar))).all()


@pytest.mark.parametrize(
    "host",
    [
        replace(HOST, eos_token_ids=frozenset()),
        host_of(sentencepiece_tokenizer("<0xZZ>"), "</s>"),
        host_of(wordpiece_tokenizer(), "</s>"),
    ],
    ids=["no-end-token", "invalid-byte-token", "wordpiece"],
)
def test_unsupported_tokenizer_refuses_response_format(host: FakeModelSpec):
    grammars = new_grammars(host)
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            grammars.compile(Schema("{}"), "", Cancellation())
        assert caught.value.param == "response_format"


EXACT = st.integers(-(2**53), 2**53)
"""Larger integers are refused."""
SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-999, 999), st.integers(0, 999)).map(
        lambda bounds: {"type": "integer", "minimum": bounds[0], "maximum": sum(bounds)}
    ),
    st.tuples(st.integers(-50, 50), st.integers(1, 50)).map(
        lambda bounds: {"type": "number", "minimum": bounds[0], "exclusiveMaximum": sum(bounds)}
    ),
    st.tuples(st.integers(0, 4), st.integers(0, 8)).map(
        lambda lengths: {"type": "string", "minLength": lengths[0], "maxLength": sum(lengths)}
    ),
    st.sampled_from(["^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(é|☃|😀)+$", "^.?x.?$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "uuid", "ipv4", "date-time"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(st.text(max_size=6) | EXACT | st.booleans(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.text(max_size=8).map(lambda value: {"const": value}),
)


def objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text(min_size=1, max_size=5)
    return st.dictionaries(names, st.tuples(schemas, st.booleans()), max_size=4).map(
        lambda fields: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in fields.items()},
            "required": [name for name, (_, is_required) in fields.items() if is_required],
            "additionalProperties": False,
        }
    )


def arrays(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(schemas, st.integers(0, 2), st.integers(0, 3)).map(
        lambda drawn: {
            "type": "array",
            "items": drawn[0],
            "minItems": drawn[1],
            "maxItems": drawn[1] + drawn[2],
        }
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        objects(inner)
        | arrays(inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda any_of: {"anyOf": any_of})
    ),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
def test_randomly_sampled_answers_conform_to_schema(grammar_of: Compile, schema: Any, seed: int):
    text = sampled_text(HOST, grammar_of(HOST, schema), np.random.default_rng(seed))
    jsonschema.validate(json.loads(text), schema)
