"""Answers held to a JSON schema: what is drawn conforms, and rows beside it notice nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers

from tests.integration.harness import GREEDY, Engine, NewEngine, ask, new_grammars
from tests.tiny_models.pictures import picture
from vlm_server.child.cancellation import Cancellation
from vlm_server.errors import InvalidRequest
from vlm_server.host_model import HostModel
from vlm_server.ports import AnswerMatcher, Grammar, SeqId
from vlm_server.prompt.grammar.constraint import SCHEMA_PARAM, Schema
from vlm_server.prompt.grammar.grammars import Grammars
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import Failed, Finished, SamplingParams
from vlm_server.runner.model.load import LoadedModel

pytestmark = pytest.mark.families()

Load = Callable[[str], tuple[LoadedModel, MultimodalPreparer]]

SHAPE = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün", '\u2028"\\\n']},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "label": {"type": "string", "maxLength": 6},
        "filled": {"type": "boolean"},
    },
    "required": ["colour", "count", "label", "filled"],
    "additionalProperties": False,
}
GREEDY_SCORED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
DEEP: Any = {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(700)]}
"""Compiles, but has too many ways to go on after the first brace."""


def held_to(schema: Any, seed: int | None = None, **changes: Any) -> SamplingParams:
    """Greedy without a seed."""
    fields = {"max_tokens": 100, "temperature": 0.0 if seed is None else 1.5, "seed": seed}
    return SamplingParams(json_schema=json.dumps(schema), **fields | changes)


def conforming(engine: Engine, request_id: str, schema: Any) -> Any:
    """What a request was answered, which is all of its answer and as its schema wants it."""
    end = engine.ends[request_id]
    assert isinstance(end, Finished), end
    assert engine.finish_reasons[SeqId(request_id)] == "stop"
    answer = json.loads(engine.texts[request_id])
    jsonschema.validate(answer, schema)
    return answer


@pytest.fixture
def engine(load_tiny: Load) -> Callable[[], Engine]:
    return lambda: Engine(*load_tiny("qwen3_vl"))


# ---- in the engine -------------------------------------------------------------------


def test_an_answer_conforms_in_every_family(new_engine: NewEngine):
    made = new_engine()
    made.add(ask("a", picture(1), "what?", sampling=held_to(SHAPE)))
    made.add(ask("b", "what?", sampling=held_to(SHAPE, seed=1)))
    made.run()
    conforming(made, "a", SHAPE)
    conforming(made, "b", SHAPE)


def test_rows_of_all_kinds_are_as_alone(engine: Callable[[], Engine]):
    free = SamplingParams(max_tokens=40, temperature=1.2, top_p=0.9, seed=5, logprobs=2)
    asked = {
        "greedy": ask("greedy", "a text", sampling=held_to(SHAPE)),
        "free": ask("free", "a text", sampling=replace_tokens(GREEDY, 60)),
        "drawn": ask("drawn", picture(2), "and?", sampling=held_to(SHAPE, seed=7)),
        "free drawn": ask("free drawn", picture(1), sampling=free),
        "other": ask("other", "a text", sampling=held_to({"type": "integer", "maximum": 5})),
        "penalized": ask(
            "penalized",
            "a text",
            sampling=held_to(SHAPE, seed=3, top_p=0.8, repetition_penalty=1.3, logit_bias={9: 50}),
        ),
    }
    alone = {name: engine().answer(each) for name, each in asked.items()}
    together = engine()
    for each in asked.values():
        together.add(each)
        together.step(4)
    together.run()
    assert together.tokens == alone
    for name in ("greedy", "drawn", "penalized"):
        conforming(together, name, SHAPE)
    assert alone["greedy"] != alone["drawn"]


def replace_tokens(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=sampling.temperature)


def test_a_row_that_leaves_takes_nothing_from_the_others(engine: Callable[[], Engine]):
    alone = engine().answer(ask("a", "a text", sampling=held_to(SHAPE, seed=2)))
    made = engine()
    for name in ("first", "a", "last"):
        made.add(ask(name, "a text", sampling=held_to(SHAPE, seed=2)))
    made.step_until(lambda: len(made.tokens.get("a", ())) > 5)
    made.abort("first")
    made.step(2)
    made.abort("last")
    made.run()
    assert made.tokens["a"] == alone


def test_an_answer_is_cut_at_its_limit(engine: Callable[[], Engine]):
    made = engine()
    assert len(made.answer(ask("a", "a text", sampling=held_to(SHAPE, max_tokens=6)))) == 6
    assert made.finish_reasons[SeqId("a")] == "length"


def test_an_answer_with_one_way_to_go_goes_it(engine: Callable[[], Engine]):
    schema = {"const": {"a\n": ["é\u2028", 1.5, None, "<|im_end|>"]}}
    made = engine()
    made.add(ask("a", "a text", sampling=held_to(schema)))
    made.run()
    assert made.texts["a"] == json.dumps(schema["const"], ensure_ascii=False)
    conforming(made, "a", schema)


def test_a_stop_string_ends_json_too(engine: Callable[[], Engine]):
    made = engine()
    made.add(ask("a", "a text", sampling=held_to(SHAPE, stop=('"count"',))))
    made.run()
    assert made.texts["a"].endswith('", ')
    assert isinstance(made.ends["a"], Finished)


def test_probabilities_are_the_models_own(engine: Callable[[], Engine]):
    made = engine()
    made.add(ask("free", "a text", sampling=GREEDY_SCORED))
    made.add(ask("held", "a text", sampling=held_to(SHAPE, max_tokens=1, logprobs=3)))
    made.run()
    (free,), (held,) = made.logprobs["free"], made.logprobs["held"]
    assert held.top == free.top
    assert held.token.text == "{"
    assert held.token.logprob < free.token.logprob


def test_a_grammar_that_gets_stuck_ends_its_request_alone(engine: Callable[[], Engine]):
    alone = engine().answer(ask("free", "a text"))
    made = engine()
    made.add(ask("free", "a text"))
    made.step(2)
    made.add(ask("stuck", "a text", sampling=held_to(DEEP)))
    made.add(ask("held", "a text", sampling=held_to(SHAPE)))
    made.run()
    end = made.ends["stuck"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert made.tokens["free"] == alone
    conforming(made, "held", SHAPE)


def test_a_schema_that_is_wrong_ends_its_request_alone(engine: Callable[[], Engine]):
    made = engine()
    made.add(ask("free", "a text"))
    made.add(ask("wrong", "a text", sampling=held_to({"type": "text"})))
    made.run()
    end = made.ends["wrong"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", SCHEMA_PARAM)
    assert isinstance(made.ends["free"], Finished)


# ---- grammars ------------------------------------------------------------------------


Compile = Callable[[HostModel, Any], Grammar]


@pytest.fixture(scope="module")
def grammar_of() -> Iterator[Compile]:
    """Compiles a schema for a model."""
    made = dict[int, tuple[HostModel, Grammars]]()

    def compiled(host: HostModel, schema: Any) -> Grammar:
        _, grammars = made.setdefault(id(host), (host, new_grammars(host)))
        return grammars.compile(Schema(json.dumps(schema)), "", Cancellation())

    yield compiled
    for _, grammars in made.values():
        grammars.close()


def allowed(matcher: AnswerMatcher) -> NDArray[np.bool_]:
    """What may come next, once that is known."""
    assert matcher.wait(30)
    return matcher.allowed()


def begin(grammar: Grammar) -> AnswerMatcher:
    (matcher,) = grammar.begin(1)
    return matcher


def drawn_text(host: HostModel, grammar: Grammar, rng: np.random.Generator) -> str:
    """A random answer, hurried to its end after a while."""
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


def test_no_other_token_than_an_end_follows_the_end(load_tiny: Load, grammar_of: Compile):
    host = load_tiny("qwen3_vl")[0].host
    matcher = begin(grammar_of(host, {"const": 5}))
    first = np.flatnonzero(allowed(matcher))
    assert [host.backend.decode([i]) for i in first] == ["5"]
    matcher.advance([int(first[0])])
    assert set(np.flatnonzero(allowed(matcher))) <= host.eos_token_ids
    assert matcher.fault is None


def test_control_tokens_are_never_allowed_within(load_tiny: Load, grammar_of: Compile):
    host = load_tiny("qwen3_vl")[0].host
    matcher = begin(grammar_of(host, {"type": "string"}))
    matcher.advance([host.backend.token_to_id('"')])
    inside = np.flatnonzero(allowed(matcher)).tolist()
    assert len(inside) > 100
    special = host.tokenizer.added_tokens_decoder
    assert not [i for i in inside if i in special or i in host.eos_token_ids]


@pytest.mark.parametrize("change", [-5, 0, 70])
def test_logits_and_vocabulary_may_differ_in_size(
    load_tiny: Load, grammar_of: Compile, change: int
):
    host = load_tiny("qwen3_vl")[0].host
    num_tokens = len(host.backend.get_vocab())
    size = num_tokens + change
    end = min(size, num_tokens) - 1
    ends = frozenset({end, num_tokens, 2**40, -1})
    grammar = grammar_of(replace(host, vocabulary_size=size, eos_token_ids=ends), {"const": "é"})
    matcher, tokens = begin(grammar), list[int]()
    while not tokens or tokens[-1] != end:
        mask = allowed(matcher)
        assert mask.shape == (size,)
        tokens.append(int(np.flatnonzero(mask)[-1]))
        matcher.advance([tokens[-1]])
    assert host.backend.decode(tokens[:-1]) == '"é"'


@pytest.mark.parametrize("text", ["e\u0301 \u2126 ", "<|im_end|>", "<|im_start|>\ufb01"])
def test_a_schemas_text_is_written_as_it_stands(load_tiny: Load, grammar_of: Compile, text: str):
    """Also where the tokenizer would compose characters, or read control tokens."""
    host = load_tiny("qwen3_vl")[0].host
    normalizing = tokenizers.Tokenizer.from_str(host.backend.to_str())
    normalizing.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])
    changed = replace(host, backend=normalizing)
    rng = np.random.default_rng(0)
    for schema in ({"const": text}, {"enum": [f"{text}a", f"{text}b"]}):
        jsonschema.validate(
            json.loads(drawn_text(changed, grammar_of(changed, schema), rng)), schema
        )


def sentencepiece_tokenizer(*more_pieces: str) -> tokenizers.Tokenizer:
    """Blanks as \u2581 and a token for each byte, as those of Llama and Gemma."""
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


def with_tokenizer(host: HostModel, backend: tokenizers.Tokenizer) -> HostModel:
    return replace(
        host,
        backend=backend,
        eos_token_ids=frozenset({backend.token_to_id("</s>")}),
        vocabulary_size=backend.get_vocab_size(),
    )


def wordpiece_tokenizer() -> tokenizers.Tokenizer:
    model = models.WordPiece(vocab={"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.mark.parametrize("seed", range(5))
def test_bytes_and_blanks_of_sentencepiece_are_read(
    load_tiny: Load, grammar_of: Compile, seed: int
):
    backend = sentencepiece_tokenizer()
    host = with_tokenizer(load_tiny("qwen3_vl")[0].host, backend)
    text = {"const": {"a ab": ["</s>\u00e9<s>", " a"]}}
    schema = {"type": "array", "prefixItems": [text, {"type": "string"}], "minItems": 2}
    rng = np.random.default_rng(seed)
    jsonschema.validate(json.loads(drawn_text(host, grammar_of(host, schema), rng)), schema)


def test_a_wrong_token_leaves_nothing_to_draw(load_tiny: Load, grammar_of: Compile):
    host = load_tiny("qwen3_vl")[0].host
    matcher = begin(grammar_of(host, {"type": "null"}))
    matcher.advance([host.backend.token_to_id("x")])
    assert not allowed(matcher).any()
    assert matcher.fault is not None
    assert "too complex to follow" in matcher.fault.message


def test_answers_of_one_grammar_are_apart(load_tiny: Load, grammar_of: Compile):
    host = load_tiny("qwen3_vl")[0].host
    grammar = grammar_of(host, {"enum": ["a", "b"]})
    first, second = grammar.begin(2)
    first.advance([host.backend.token_to_id('"')])
    assert (allowed(first) != allowed(second)).any()
    assert (allowed(second) == allowed(begin(grammar))).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda host: replace(host, eos_token_ids=frozenset()),
        lambda host: with_tokenizer(host, sentencepiece_tokenizer("<0xZZ>")),
        lambda host: with_tokenizer(host, wordpiece_tokenizer()),
    ],
    ids=["no end", "a byte that is none", "neither bytes nor characters"],
)
def test_a_model_that_can_not_be_held_to_json_refuses_it(
    load_tiny: Load, change: Callable[[HostModel], HostModel]
):
    grammars = new_grammars(change(load_tiny("qwen3_vl")[0].host))
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
        lambda made: {
            "type": "array",
            "items": made[0],
            "minItems": made[1],
            "maxItems": made[1] + made[2],
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


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
def test_whatever_is_drawn_conforms(load_tiny: Load, grammar_of: Compile, schema: Any, seed: int):
    host = load_tiny("qwen3_vl")[0].host
    text = drawn_text(host, grammar_of(host, schema), np.random.default_rng(seed))
    jsonschema.validate(json.loads(text), schema)
