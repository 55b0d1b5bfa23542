"""Without the system's memory limits, a child process is killed by its waiting parent."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.as_mac import macos
from tests.unit.prompt.grammar.test_grammars import HUGE, byte_host, compiled, refusal
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildFailed, ChildPool
from vlm_server.prompt.grammar.grammar_cache import Grammars
from vlm_server.prompt.grammar.grammar_client import GrammarLimits

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a stand-in for macOS"),
    pytest.mark.usefixtures("as_mac"),
]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture
def as_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is taken for macOS by this process and its children."""
    path = os.pathsep.join([str(ROOT / "tests/as_mac/site"), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", macos.library)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(byte_host(), GrammarLimits(60.0, 64 * MIB, 60.0), 128 * MIB)
    yield made
    made.close()


def test_child_job_beyond_memory_bound_ends_its_process():
    pool = ChildPool("tests.unit.platform.child.echo", 1, memory_bytes=200 * MIB)
    try:
        with pytest.raises(ChildFailed, match="more memory"):
            pool.run(f"hold {400 * MIB}".encode(), 50.0, Cancellation())
        assert pool.run(b"echo next", 50.0, Cancellation()) == b"next"
    finally:
        pool.close()


def test_schema_beyond_memory_bound_is_refused(grammars: Grammars):
    assert "too much memory" in refusal(grammars, HUGE)
    assert compiled(grammars, {"const": 1}).is_alive


def test_grammar_size_reflects_memory_of_its_process(grammars: Grammars):
    small = compiled(grammars, {"const": 1})
    large = compiled(grammars, {"type": "string", "pattern": "^a{30000}$"})
    assert 0 < small.size_bytes < large.size_bytes - 4 * MIB
