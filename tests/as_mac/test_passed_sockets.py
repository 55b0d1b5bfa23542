"""A socket that is passed to another process stays open here until that process has it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from tests.as_mac import in_flight
from tests.unit.prompt.grammar.test_grammars import byte_host
from vlm_server.errors import InternalError
from vlm_server.platform.child import passing
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.passing import PassedSocket
from vlm_server.prompt.grammar.constraints import Schema
from vlm_server.prompt.grammar.grammar_cache import Grammars
from vlm_server.prompt.grammar.grammar_client import CompiledGrammar, GrammarLimits

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="asks what was received; macOS itself does"),
    pytest.mark.usefixtures("flush_sockets_in_flight"),
]


@pytest.fixture
def flush_sockets_in_flight() -> Iterator[None]:
    """Empty sockets that are closed in flight."""
    in_flight.install()
    yield
    in_flight.remove()


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(byte_host(), GrammarLimits(60.0, 256 << 20, 60.0), 128 << 20)
    compile_constant(made, 0)
    yield made
    made.close()


def compile_constant(grammars: Grammars, constant: int) -> CompiledGrammar:
    return grammars.compile(Schema(json.dumps({"const": constant})), "", Cancellation())


def server_pid(grammars: Grammars) -> int:
    return int(grammars._server._end.peek()[2][1].pid)  # type: ignore[attr-defined]


@contextmanager
def stopped_process(pid: int) -> Iterator[None]:
    """Stop a process, so that it receives nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the test may have killed it
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def socket_sent(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set once a socket was sent and its sender waits."""
    event = threading.Event()
    real = PassedSocket.wait

    def wait(self: PassedSocket, events: int, seconds: float) -> bool:
        event.set()
        return real(self, events, seconds)

    monkeypatch.setattr(PassedSocket, "wait", wait)
    return event


def test_busy_grammar_server_receives_passed_socket(
    grammars: Grammars, socket_sent: threading.Event
):
    with ThreadPoolExecutor(1) as pool:
        with stopped_process(server_pid(grammars)):
            socket_sent.clear()
            grammar = pool.submit(compile_constant, grammars, 1)
            assert socket_sent.wait(10)
        assert grammar.result(30).is_alive


def test_busy_grammar_process_follows_answer_later(grammars: Grammars):
    grammar = compile_constant(grammars, 12)
    with stopped_process(grammar.process._pid):
        (matcher,) = grammar.begin(1)
        matcher.advance([byte_host().backend.token_to_id("1")])
        assert not matcher.wait(0.05)
    assert matcher.wait(30)
    assert matcher.error is None
    assert matcher.allowed()[byte_host().backend.token_to_id("2")]
    matcher.close()


def test_grammar_killed_before_receiving_socket_ends_answers(grammars: Grammars):
    grammar = compile_constant(grammars, 1)
    pid = grammar.process._pid
    with stopped_process(pid):
        (matcher,) = grammar.begin(1)
        os.kill(pid, signal.SIGKILL)
    matcher.advance([byte_host().backend.token_to_id("1")])
    started = time.monotonic()
    assert matcher.wait(30)
    assert not matcher.allowed().any()
    assert time.monotonic() - started < 10


def test_grammar_server_killed_before_receiving_socket_is_replaced(
    grammars: Grammars, socket_sent: threading.Event
):
    pid = server_pid(grammars)
    with ThreadPoolExecutor(1) as pool, stopped_process(pid):
        socket_sent.clear()
        failing = pool.submit(compile_constant, grammars, 1)
        assert socket_sent.wait(10)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InternalError):
            failing.result(10)
    assert compile_constant(grammars, 1).is_alive


@pytest.mark.parametrize("end", [0, 1])
def test_socket_pair_buffers_hold_whole_message(end: int, monkeypatch: pytest.MonkeyPatch):
    """Room for a whole mask or image while the other side has no core."""
    real = socket.socketpair

    def small() -> tuple[socket.socket, socket.socket]:
        pair = real()
        for each in pair:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 10)
        return pair

    monkeypatch.setattr(socket, "socketpair", small)
    pair = passing.socket_pair(64 << 10)
    pair[end].setblocking(False)
    assert pair[end].send(bytes(48 << 10)) == 48 << 10
    for each in pair:
        each.close()


@pytest.mark.parametrize("end", [PassedSocket.close, PassedSocket.acknowledge])
def test_passed_socket_is_closed_after_acknowledgement(end: Callable[[PassedSocket], None]):
    here, there = socket.socketpair()
    passed = PassedSocket()
    passed.send(here, b"x")
    arriving = passing.receive(there, 1)
    message, connection = next(arriving)
    assert message == b"x"
    assert passed.wait(select.POLLIN, 10)
    assert passed.connection.recv(9) == passing.ACKNOWLEDGEMENT
    end(passed)
    passed.connection.close()
    connection.settimeout(10)
    assert connection.recv(1) == b""
    here.close()
    assert list(arriving) == []
    there.close()
