"""Compiles JSON schemas for llguidance, and tries new ones in a process of their own.

Most schemas compile in a millisecond, but some of 10 kB take minutes and 20 GB, or overflow the
stack, and a compilation can't be stopped. So one that nobody compiled yet is tried in a process
that may die or be killed: `python -m vlm_server.prompt.json_grammar` reads a schema and writes
what is wrong with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from vlm_server.child import launch

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 200
_MAX_EXACT, _EXACT_DIGITS = 1 << 53, 17
_TRIAL_BYTES = 2 << 30
_NICENESS = 5  # the answers that are running come first
_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,  # a model that may write blanks can do so for ever
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": None,
    "json_allow_general_unicode_escapes": False,
}
"""All options: a schema could set those left out. Separators are those of `json.dumps`."""
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
"""A lexer's state takes 1 to 2 kB, and each answer has its own."""


class SchemaError(Exception):
    """A schema that can't be compiled; the message says why, in one line."""


def compile_schema(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    """A matcher at the beginning of an answer. Raises SchemaError."""
    _check_integers(schema)
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
    except ValueError as error:
        raise SchemaError(_one_line(str(error))) from None
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    matcher.compute_bitmask()  # some fail only here
    if matcher.is_error():
        raise SchemaError(_one_line(matcher.get_error()))
    return matcher


def _check_integers(schema: str) -> None:
    """llguidance reads numbers as doubles: a larger integer would become another one."""

    def parse(digits: str) -> int:
        if len(digits) > _EXACT_DIGITS or abs(int(digits)) > _MAX_EXACT:
            raise SchemaError("it has an integer of more than 53 bits")
        return int(digits)

    with contextlib.suppress(ValueError, RecursionError):  # no JSON: llguidance says why
        json.loads(schema, parse_int=parse)


def try_schema(schema: str, seconds: float) -> None:
    """Compile `schema` elsewhere. Raises SchemaError, also if it takes more than `seconds`."""
    try:
        trial = subprocess.run(
            launch.command(__name__, str(seconds)),
            input=schema.encode(),
            capture_output=True,
            timeout=seconds,
            env=launch.environment(),
            cwd=launch.FOLDER,
        )
    except subprocess.TimeoutExpired:
        raise SchemaError(f"it takes more than {seconds:g} seconds") from None
    if trial.returncode:
        last_words = trial.stderr[-500:].decode(errors="replace")
        logger.warning("a schema's trial ended with status %d: %s", trial.returncode, last_words)
        raise SchemaError("it takes too much memory, or is nested too deeply")
    if trial.stdout:
        raise SchemaError(trial.stdout.decode())


def _one_line(message: str) -> str:
    if message.startswith("panic") or "<non-verbose/>" in message:
        return "it is too complex"
    return re.sub(r"\s+", " ", message)[:_MAX_REASON_CHARS]


class _Bytes:
    """The least tokenizer: a token for each byte, and an end."""

    bos_token_id = None
    eos_token_id = 256
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _trial() -> None:
    """Ends with an error, or by a signal, if the schema asks for too much."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError, ValueError):  # macOS knows no limit of memory
        resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES, _TRIAL_BYTES))
    seconds = int(float(sys.argv[1])) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # should nobody wait any more
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compile_schema(LLTokenizer(TokenizerWrapper(_Bytes())), sys.stdin.buffer.read().decode())
    except SchemaError as error:
        sys.stdout.write(str(error))


if __name__ == "__main__":
    _trial()
