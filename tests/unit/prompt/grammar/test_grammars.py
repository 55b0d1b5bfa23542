"""Schemas are compiled and followed in bounded child processes, whose failures stay there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.support.daemons import is_alive
from vlm_server.errors import InternalError, InvalidRequest
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.grammar.constraints import SCHEMA_PARAM, Schema
from vlm_server.prompt.grammar.grammar_cache import Grammars
from vlm_server.prompt.grammar.grammar_client import CompiledGrammar, GrammarLimits

HUGE = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}b"} for i in range(1, 200)]}
"""A schema whose compilation would take minutes and 20 GB."""
SLOW = {"type": "string", "pattern": "^a{99999}$"}
"""A schema that takes 40 MB, and at least 25 ms per token."""


def byte_host() -> Any:
    """The fields of a `ModelSpec` that `Grammars` reads: one token per byte, and an end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {"<end>": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return SimpleNamespace(
        backend=backend,
        vocabulary_size=257,
        eos_token_ids=frozenset({256}),
        tool_parser=None,
        reasoning_format=None,
    )


New = Callable[..., Grammars]


@pytest.fixture
def new() -> Iterator[New]:
    """A factory of grammars with generous limits."""
    created: list[Grammars] = []

    def grammars(
        compile_seconds: float = 60.0,
        memory_bytes: int = 256 << 20,
        follow_seconds: float = 60.0,
        cache_bytes: int = 128 << 20,
        host: Any = None,
    ) -> Grammars:
        limits = GrammarLimits(compile_seconds, memory_bytes, follow_seconds)
        created.append(Grammars(host or byte_host(), limits, cache_bytes))
        return created[-1]

    yield grammars
    for grammar in created:
        grammar.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """Grammars that a module shares, for tests that only check masks and refusals."""
    created = Grammars(byte_host(), GrammarLimits(60.0, 256 << 20, 60.0), 128 << 20)
    yield created
    created.close()


def compiled(grammars: Grammars, schema: Any, salt: str = "") -> CompiledGrammar:
    return grammars.compile(Schema(json.dumps(schema)), salt, Cancellation())


def refusal(grammars: Grammars, schema: Any, salt: str = "") -> str:
    with pytest.raises(InvalidRequest) as caught:
        compiled(grammars, schema, salt)
    assert caught.value.param == SCHEMA_PARAM
    assert caught.value.message.isprintable()
    assert len(caught.value.message) <= 300
    return caught.value.message


def pid_of(grammar: CompiledGrammar) -> int:
    return grammar.process._pid


def becomes_true(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ---- compiling -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"title": "T", "description": "é", "type": "string", "default": "x", "examples": [1]},
        {"type": ["string", "null"], "maxLength": 10**9},
        {"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        {"properties": {"a": {"type": "integer", "minimum": -5}}, "required": ["a"]},
        {"enum": [2**53, -(2**53)]},
        {"type": "string", "pattern": "^(a+)+b$"},
    ],
)
def test_supported_schemas_compile(grammars: Grammars, schema: Any):
    assert compiled(grammars, schema).size_bytes < 20 << 20


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "text"}, "Invalid type"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"enum": []}, "empty"),
        ({"enum": [1, {"a": [2**53 + 1]}]}, "more than 53 bits"),
        ({"const": -(10**400)}, "more than 53 bits"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible"),
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "http://127.0.0.1/schema.json"}, "retriev"),
        ({"$ref": "file:///etc/passwd"}, "retriev"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "#"}, "complex"),
    ],
)
def test_invalid_schema_is_refused_with_reason_in_one_line(
    grammars: Grammars, schema: Any, reason: str
):
    assert reason in refusal(grammars, schema)


def test_slow_schema_compilation_times_out_and_is_remembered(new: New):
    grammars = new(compile_seconds=1.0, memory_bytes=8 << 30)
    started = time.monotonic()
    assert "more than 1 seconds" in refusal(grammars, HUGE)
    first, started = time.monotonic() - started, time.monotonic()
    assert "more than 1 seconds" in refusal(grammars, HUGE)
    assert time.monotonic() - started < 0.5 < first < 30


def test_schema_beyond_compile_memory_is_refused(new: New):
    assert "memory" in refusal(new(memory_bytes=64 << 20), HUGE)


def test_deeply_nested_schema_is_refused_and_server_survives(new: New):
    depth = 100_000
    grammars = new()
    deep = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(InvalidRequest):
        grammars.compile(Schema(deep), "", Cancellation())
    assert compiled(grammars, {})


@pytest.mark.alone
def test_refused_schemas_leave_engine_memory_unchanged(new: New):
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("the system does not tell")
    grammars = new(memory_bytes=64 << 20)
    refusal(grammars, HUGE)
    before = resident_bytes()
    for number in range(5):
        refusal(grammars, {**HUGE, "title": f"{number}"})
    assert resident_bytes() - before < 10 << 20


def test_cancelled_schema_compilation_ends_and_is_not_remembered(new: New):
    grammars, cancellation = new(memory_bytes=8 << 30), Cancellation()
    compiled(grammars, {})
    threading.Timer(0.3, cancellation.cancel).start()
    started = time.monotonic()
    with pytest.raises(InternalError):
        grammars.compile(Schema(json.dumps(HUGE)), "", cancellation)
    assert time.monotonic() - started < 20
    assert not grammars._refusals.stats().entries


def test_grammar_server_restarts_and_keeps_compiled_grammars(new: New):
    grammars = new()
    kept = compiled(grammars, {"const": 1})
    grammars._server._end()
    assert compiled(grammars, {"const": 2}) is not kept
    assert compiled(grammars, {"const": 1}) is kept, "grammars live on"


# ---- the caches ----------------------------------------------------------------------


def test_grammars_are_cached_by_schema_and_salt(new: New):
    grammars = new()
    mine = compiled(grammars, {"const": 1}, "mine")
    assert compiled(grammars, {"const": 1}, "mine") is mine
    assert compiled(grammars, {"const": 1}, "yours") is not mine
    assert compiled(grammars, {"const": 2}, "mine") is not mine


def test_schema_refusals_are_cached_by_salt(new: New):
    grammars = new()
    refusal(grammars, {"not": {}}, "mine")
    assert grammars._refusals.stats().entries == 1
    refusal(grammars, {"not": {}}, "yours")
    assert grammars._refusals.stats().entries == 2


def test_grammar_cache_is_bounded_and_evicted_processes_end(new: New):
    grammars = new(cache_bytes=16 << 20)
    pids = [pid_of(compiled(grammars, {"const": number})) for number in range(12)]
    assert grammars._kept.stats().size_bytes <= 16 << 20
    kept = grammars._kept.stats().entries
    assert 1 <= kept < 12
    assert becomes_true(lambda: sum(map(is_alive, pids)) == kept)
    grammars._kept.clear()
    assert becomes_true(lambda: not any(map(is_alive, pids)))


def test_grammar_larger_than_cache_is_not_kept(new: New):
    grammars = new(cache_bytes=16 << 20)
    pid = pid_of(compiled(grammars, SLOW))
    assert becomes_true(lambda: not is_alive(pid))


def test_grammar_of_killed_process_is_recompiled(new: New):
    grammars = new()
    first = compiled(grammars, {"const": 1})
    first.process.kill()
    assert becomes_true(lambda: not first.is_alive)
    (orphan,) = first.begin(1)
    orphan.advance([1])
    assert orphan.wait(10)
    assert not orphan.allowed().any()
    assert orphan.error is not None
    assert "memory" in orphan.error.message
    again = compiled(grammars, {"const": 1})
    assert again is not first
    assert compiled(grammars, {"const": 1}) is again


# ---- answers -------------------------------------------------------------------------


def test_answer_process_ends_when_last_matcher_closes(new: New):
    grammar = compiled(new(), {"type": "string"})
    first, second = grammar.begin(2)
    for matcher in (first, second):
        matcher.advance([byte_host().backend.token_to_id('"')])
        assert matcher.wait(10)
    pid = first._answers.process._pid
    assert is_alive(pid)
    first.close()
    first.close()
    assert is_alive(pid)
    second.close()
    assert becomes_true(lambda: not is_alive(pid))


def test_answer_process_ends_if_closed_while_computing(new: New):
    grammar = compiled(new(), SLOW)
    (matcher,) = grammar.begin(1)
    letter = byte_host().backend.token_to_id
    matcher.advance([letter('"')])
    assert matcher.wait(30)
    matcher.advance([letter("a")])
    matcher.close()
    pid = matcher._answers.process._pid
    assert becomes_true(lambda: not is_alive(pid))


def test_look_ahead_masks_equal_stepwise_masks(new: New):
    schema = {"type": "array", "items": {"const": "abc"}, "minItems": 2}
    drafts = [byte_host().backend.token_to_id(text) for text in ("[", '"', "a", "x", "b")]
    ahead, plain = compiled(new(), schema).begin(2)
    ahead.look_ahead(drafts)
    assert ahead.wait(10)
    masks = list(ahead.draft_masks())
    assert len(masks) == 3, "x may not come"
    for mask, token_id in zip(masks, drafts, strict=False):
        plain.advance([token_id])
        assert plain.wait(10)
        assert np.array_equal(mask, plain.allowed())
    assert ahead.allowed()[drafts[0]]
    ahead.advance(drafts[:3])
    assert ahead.wait(10)
    assert np.array_equal(ahead.allowed(), plain.allowed())
    assert list(ahead.draft_masks()) == []


def test_matcher_reports_forced_tokens(new: New):
    (matcher,) = compiled(new(), {"const": "abcdef"}).begin(1)
    matcher.advance([byte_host().backend.token_to_id('"')])
    assert matcher.wait(10)
    forced = list(matcher.forced)
    assert byte_host().backend.decode(forced).startswith("abc")
    matcher.look_ahead(forced)
    assert matcher.wait(10)
    assert len(matcher.draft_masks()) == len(forced)


def test_matcher_advance_and_wait_zero_do_not_block(new: New):
    (matcher,) = compiled(new(), SLOW).begin(1)
    started = time.monotonic()
    matcher.advance([byte_host().backend.token_to_id('"')])
    matcher.wait(0.0)
    assert time.monotonic() - started < 1.0
    assert matcher.wait(30)
    assert matcher.allowed().sum() == 1


def test_schema_too_slow_to_follow_is_given_up(new: New):
    (matcher,) = compiled(new(follow_seconds=0.1), SLOW).begin(1)
    for text in '"' + "a" * 200:
        matcher.advance([byte_host().backend.token_to_id(text)])
        assert matcher.wait(30)
        if not matcher.allowed().any():
            break
    assert matcher.error is not None
    assert matcher.error.message == "this schema can't be obeyed: it is too slow to follow"


def test_grammar_server_death_does_not_refuse_schema(new: New):
    grammars = new()
    compiled(grammars, {"type": "integer"})
    control = grammars._server._control
    assert control is not None
    control.shutdown(socket.SHUT_WR)  # the server takes it for the engine's end
    with contextlib.suppress(InternalError):
        compiled(grammars, {"type": "boolean"})
    assert compiled(grammars, {"type": "boolean"}).is_alive
