"""The process that knows the vocabulary, and forks another one for each grammar and each request.

    server, one for an engine: reads the tokenizer, then waits for sockets
     └ grammar, one for a constraint: compiles it, then waits for sockets
        └ answers, one for a request: replies to tokens with masks

Each serves one socket, and ends when that is closed. Engine's side: `grammar_client` (server and
grammar) and `answer_process` (answers).
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
from llguidance import LLTokenizer

from vlm_server.platform.child import messages, passing
from vlm_server.platform.footprint import footprint_bytes
from vlm_server.prompt.grammar.bounded_numbers import BoundedMatcher
from vlm_server.prompt.grammar.compiler import compile_constraint
from vlm_server.prompt.grammar.constraints import decode
from vlm_server.prompt.grammar.forked_process import (
    COUNT,
    PID,
    Compiled,
    Follow,
    Masks,
    SchemaError,
)

_MAX_FORCED = 16
_UNKNOWN_BYTES = 4 << 20
"""The assumed size of a grammar where the system does not report it."""


def main() -> None:
    """Serve the socket that is the standard input until it is closed."""
    control = socket.socket(fileno=os.dup(0))
    _drop_standard_files()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the system
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    described, _ = messages.read(_reader(control))
    start = json.loads(described)
    del described
    memory_bytes, seconds = start["memory_bytes"], start["seconds"]
    try:
        tokenizer = LLTokenizer(start["tokenizer"], n_vocab=start["size"], eos_token=start["ends"])
    except BaseException as error:  # a panic of Rust's is no Exception  # noqa: BLE001
        control.sendall(messages.pack(str(error).encode()))
        return
    del start
    gc.collect()
    gc.freeze()  # else the forks would write into the pages that they share
    gc.disable()
    control.sendall(messages.pack(b"", flag=True))

    serve = partial(_serve_grammar, tokenizer=tokenizer, memory_bytes=memory_bytes, seconds=seconds)
    for _, connection in passing.receive(control, 1):
        _fork(serve, connection, control)


def _serve_grammar(
    connection: socket.socket, *, tokenizer: LLTokenizer, memory_bytes: int, seconds: float
) -> None:
    """Compile the constraint received, then fork for the answers of each request."""
    described, _ = messages.read(_reader(connection))
    _limit_memory(memory_bytes)
    try:
        with _alarm(seconds):
            matcher = compile_constraint(tokenizer, decode(described))
            mask = matcher.mask()
    except SchemaError as error:
        connection.sendall(messages.pack(str(error).encode()))
        return
    compiled = msgspec.msgpack.encode(Compiled(_private_bytes(), mask))
    connection.sendall(messages.pack(compiled, flag=True))
    for request, answers in passing.receive(connection, COUNT.size):
        (count,) = COUNT.unpack(request)
        _fork(partial(_follow, start=matcher, count=count, seconds=seconds), answers, connection)


def _follow(
    connection: socket.socket, *, start: BoundedMatcher, count: int, seconds: float
) -> NoReturn:
    """Reply to tokens of `count` answers with masks, each within `seconds`."""
    matchers: list[BoundedMatcher | None] = [None] * count
    reader = _reader(connection)
    while True:
        follow = msgspec.msgpack.decode(messages.read(reader)[0], type=Follow)
        started_at = time.process_time()
        with _alarm(seconds):
            matcher = matchers[follow.choice] or start.deep_copy()
            matchers[follow.choice] = matcher
            masks, forced = _masks(matcher, follow)
        reply = Masks(masks, tuple(forced), time.process_time() - started_at)
        connection.sendall(messages.pack(msgspec.msgpack.encode(reply)))


def _masks(matcher: BoundedMatcher, follow: Follow) -> tuple[list[bytes], list[int]]:
    """The masks and the forced tokens of a reply."""
    masks: list[bytes] = []
    if not follow.are_drafts:
        for token_id in follow.token_ids:
            matcher.append(token_id)
        mask = matcher.mask()
        if matcher.is_error():
            return [b""], []
        return [mask], matcher.forced_tokens()[:_MAX_FORCED]
    ahead = matcher.deep_copy()
    for token_id in follow.token_ids:
        if ahead.is_error() or not ahead.try_append(token_id):
            break
        masks.append(ahead.mask())
    return masks + [b""] * (len(follow.token_ids) - len(masks)), []


def _fork(
    work: Callable[[socket.socket], None], connection: socket.socket, listener: socket.socket
) -> None:
    """Do `work` with `connection` in a new process; if the fork fails, the connection closes."""
    try:
        if os.fork():
            return
    except OSError:
        return
    try:
        listener.close()
        connection.sendall(PID.pack(os.getpid()))
        work(connection)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer, even if the engine is gone."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory(more_bytes: int) -> None:
    """Bound the memory that the process may add, on Linux; on macOS `ForkedProcess` does."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * mmap.PAGESIZE + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _private_bytes() -> int:
    """Memory that this process does not share with the one that forked it."""
    if sys.platform == "darwin":  # counts shared pages that were only read
        return footprint_bytes() or _UNKNOWN_BYTES
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return _UNKNOWN_BYTES
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


def _drop_standard_files() -> None:
    """Discard output of libraries: the engine logs why a process ended."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.close(nowhere)


def _reader(connection: socket.socket) -> messages.PipeReader:
    return connection.makefile("rb", buffering=0)


if __name__ == "__main__":
    main()
