"""The process that knows the vocabulary, and forks another one for each grammar and each request.

    server, one for an engine: reads the tokenizer, then waits for sockets
     └ grammar, one for a schema, or the tools of requests: compiles it, then waits for sockets
        └ answers, one for a request: takes tokens, says which may come next

What one costs is bounded and given back, as all of it is in processes that end with it. Each
serves one socket, and ends when that is closed. `server` and `answers` are the engine's side.
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
from typing import BinaryIO, NoReturn

from llguidance import LLMatcher, LLTokenizer

from vlm_server.platform.child import messages, passing
from vlm_server.platform.footprint import footprint_bytes
from vlm_server.prompt.grammar.constraints import decode
from vlm_server.prompt.grammar.peer import (
    BEGIN,
    COMPILED,
    MASK,
    MAX_FORCED,
    PID,
    TOKENS,
    SchemaError,
)
from vlm_server.prompt.grammar.schema import compile_constraint

_UNKNOWN_BYTES = 4 << 20
"""Taken for the size of a grammar where the system does not tell."""


def main() -> None:
    """Serve the socket that is the standard input until it is closed."""
    control = socket.socket(fileno=os.dup(0))
    _drop_standard_files()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    described, _ = messages.read(_reader(control))
    start = json.loads(described)
    del described
    try:
        tokenizer = LLTokenizer(start["tokenizer"], n_vocab=start["size"], eos_token=start["ends"])
    except BaseException as error:  # a panic of Rust's is no Exception  # noqa: BLE001
        _answer(control, str(error).encode(), flag=False)
        return
    limits = start["memory_bytes"], start["seconds"]
    del start
    gc.collect()
    gc.freeze()  # else the forks would write into the pages that they share
    gc.disable()
    _answer(control, b"", flag=True)

    def serve_grammar(connection: socket.socket) -> None:
        _Grammar(tokenizer, connection, *limits).serve()

    for _, connection in passing.received(control, 1):
        _fork(serve_grammar, connection, control)


class _Grammar:
    """A compiled constraint, and the forks that follow the answers of each request."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        connection: socket.socket,
        memory_bytes: int,
        seconds: float,
    ) -> None:
        self._connection = connection
        self._seconds = seconds
        connection.sendall(PID.pack(os.getpid()))
        described, _ = messages.read(_reader(connection))
        _limit_memory(memory_bytes)
        try:
            with _alarm(seconds):
                self._matcher = compile_constraint(tokenizer, decode(described))
                mask = self._matcher.compute_bitmask()
        except SchemaError as error:
            _answer(connection, str(error).encode(), flag=False)
            os._exit(0)
        self._mask_bytes = len(mask)
        _answer(connection, COMPILED.pack(_private_bytes(), len(mask)) + mask, flag=True)

    def serve(self) -> None:
        for request, connection in passing.received(self._connection, BEGIN.size):
            (count,) = BEGIN.unpack(request)
            _fork(partial(self._follow, count=count), connection, self._connection)

    def _follow(self, connection: socket.socket, *, count: int) -> None:
        matchers: list[LLMatcher | None] = [None] * count
        connection.sendall(PID.pack(os.getpid()))
        reader = _reader(connection)
        while True:
            choice, *counts = TOKENS.unpack(_exactly(reader, TOKENS.size))
            sampled, ahead = ([_token_id(reader) for _ in range(count)] for count in counts)
            started = time.process_time()
            with _alarm(self._seconds):
                matcher = matchers[choice] or self._matcher.deep_copy()
                matchers[choice] = matcher
                replies = list(_replies(matcher, sampled, ahead))
            seconds = (time.process_time() - started) / max(len(replies), 1)
            empty = bytes(self._mask_bytes)
            connection.sendall(
                b"".join(
                    MASK.pack(can_go_on, seconds, len(forced), *_filled(forced)) + (mask or empty)
                    for can_go_on, forced, mask in replies
                )
            )


def _replies(
    matcher: LLMatcher, sampled: list[int], ahead: list[int]
) -> Iterator[tuple[bool, list[int], bytes]]:
    """Whether the answer can go on, its forced tokens, and the mask: for each requested mask."""
    if sampled:
        for token_id in sampled:
            matcher.consume_token(token_id)
        mask = matcher.compute_bitmask()
        is_alive = not matcher.is_error()
        yield is_alive, matcher.compute_ff_tokens()[:MAX_FORCED] if is_alive else [], mask
    num_taken = 0
    for token_id in ahead:
        if matcher.is_error() or matcher.try_consume_tokens([token_id]) != 1:
            break
        num_taken += 1
        yield True, [], matcher.compute_bitmask()
    for _ in ahead[num_taken:]:
        yield False, [], b""
    if num_taken:
        matcher.rollback(num_taken)


def _filled(forced: list[int]) -> list[int]:
    return forced + [0] * (MAX_FORCED - len(forced))


def _token_id(reader: BinaryIO) -> int:
    return int.from_bytes(_exactly(reader, 4), "little")


def _fork(
    work: Callable[[socket.socket], None], connection: socket.socket, listener: socket.socket
) -> None:
    """Let a new process do `work` with `connection`; it ends when that is closed.

    If there can be none, `connection` is closed, which is all that its other end is told.
    """
    try:
        if os.fork():
            return
    except OSError:
        return
    try:
        listener.close()
        work(connection)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End the process if this takes longer, even if nobody is left who would."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory(more_bytes: int) -> None:
    """Bound the memory that the process may add, on Linux; on macOS the engine does (`Peer`)."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * mmap.PAGESIZE + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _private_bytes() -> int:
    """Memory that this process does not share with the one that forked it."""
    if sys.platform == "darwin":  # a page that it has only read may count as its own
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


def _reader(connection: socket.socket) -> BinaryIO:
    return connection.makefile("rb", buffering=0)  # type: ignore[return-value]


def _exactly(reader: BinaryIO, size: int) -> bytes:
    """`size` bytes; ends the process at the end of the stream."""
    data = b""
    while len(data) < size:
        data += reader.read(size - len(data)) or _end()
    return data


def _answer(connection: socket.socket, body: bytes, *, flag: bool) -> None:
    with connection.makefile("wb") as writer:
        messages.write(writer, body, flag=flag)


def _end() -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    main()
