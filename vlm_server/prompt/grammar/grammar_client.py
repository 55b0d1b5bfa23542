"""The engine's client of `grammar_process`, and compiled grammars."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import InternalError
from vlm_server.platform.child import launch, messages
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.passing import PassedSocket
from vlm_server.prompt.grammar.answer_process import AnswerProcess, RemoteMatcher, unpack
from vlm_server.prompt.grammar.constraints import Constraint, encode
from vlm_server.prompt.grammar.forked_process import Compiled, ForkedProcess, SchemaError

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0


class GrammarsUnavailable(Exception):
    """This model's tokenizer can't be held to JSON; the message says why."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits on one constraint."""

    compile_seconds: float
    """Time to compile it, and to compute one mask."""
    memory_bytes: int
    """Memory of each process, beyond the memory that it shares."""
    follow_seconds: float
    """CPU time for the masks of one request, beyond 5 ms each."""


class GrammarClient:
    """Compiles constraints in the grammar process, started on demand. Thread-safe."""

    def __init__(
        self, describe: Callable[[], dict[str, Any]], vocabulary_size: int, limits: GrammarLimits
    ) -> None:
        """describe: returns the start message. Masks have `vocabulary_size` bits."""
        self._describe = describe
        self._vocabulary_size = vocabulary_size
        self._limits = limits
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._unavailable: str | None = None
        self._end: Callable[[], object] = lambda: None

    def warm_up(self) -> None:
        """Start the process in the background, so that the first schema does not wait for it."""

        def start() -> None:
            with contextlib.suppress(InternalError, GrammarsUnavailable):  # raised by `compile`
                self._control_socket()

        threading.Thread(target=start, name="grammar-server", daemon=True).start()

    def compile(self, constraint: Constraint, cancellation: Cancellation) -> CompiledGrammar:
        """The grammar of `constraint`. Raises SchemaError, GrammarsUnavailable and InternalError,
        the last also when cancelled."""
        process = ForkedProcess(self._connect(), self._limits.memory_bytes)
        try:
            compiled = self._compile(process, encode(constraint), cancellation)
        except BaseException:
            process.close()
            raise
        first_mask = unpack(compiled.mask, self._vocabulary_size)
        return CompiledGrammar(process, constraint, first_mask, compiled.size_bytes, self._limits)

    def close(self) -> None:
        """End the process. Compiled grammars live on."""
        with self._lock:
            self._end()
            self._control = None

    def _compile(
        self, process: ForkedProcess, described: bytes, cancellation: Cancellation
    ) -> Compiled:
        seconds = self._limits.compile_seconds
        started_at = time.monotonic()
        try:
            process.greet()
        except (OSError, EOFError):  # no fault of the schema's
            raise InternalError("Schemas can't be compiled.") from None
        try:
            cancellation.on_cancel(process.kill)
            process.send(messages.pack(described))
            answer, flag = process.receive_late(seconds)
        except (OSError, EOFError):
            process.kill()
            if cancellation.is_cancelled:
                raise InternalError("The request was cancelled.") from None
            if time.monotonic() - started_at >= seconds:
                raise SchemaError(f"it takes more than {seconds:g} seconds") from None
            raise SchemaError("it takes too much memory, or is nested too deeply") from None
        finally:
            cancellation.on_cancel(None)
        if not flag:
            raise SchemaError(answer.decode(errors="replace"))
        return msgspec.msgpack.decode(answer, type=Compiled)

    def _connect(self) -> PassedSocket:
        """A socket with its other end passed to the process."""
        for _ in range(2):  # the process may have been killed since its last use
            control = self._control_socket()
            passed_socket = PassedSocket()
            try:
                passed_socket.send(control, b"\0")
                return passed_socket
            except OSError:
                passed_socket.close()
                with self._lock:
                    if self._control is control:
                        self._control = None
        raise InternalError("Schemas can't be compiled.")

    def _control_socket(self) -> socket.socket:
        """The socket of the process, once it knows the vocabulary. Raises as `compile` does."""
        with self._lock:
            if self._unavailable is not None:
                raise GrammarsUnavailable(self._unavailable)
            if self._control is None:
                self._end()
                self._control = self._start()
            return self._control

    def _start(self) -> socket.socket:
        own_socket, child_socket = socket.socketpair()
        with child_socket:
            process = subprocess.Popen(
                launch.command("vlm_server.prompt.grammar.grammar_process"),
                stdin=child_socket.fileno(),
                env=launch.environment(),
                cwd="/",
                start_new_session=True,  # a terminal's Ctrl-C is for the front alone
            )
        self._end = weakref.finalize(self, _end, own_socket, process)
        described = self._describe() | {
            "memory_bytes": self._limits.memory_bytes,
            "seconds": self._limits.compile_seconds,
        }
        own_socket.settimeout(_START_SECONDS)
        try:
            own_socket.sendall(messages.pack(json.dumps(described).encode()))
            with own_socket.makefile("rb", buffering=0) as reader:
                reason, flag = messages.read(reader)
        except (OSError, EOFError):
            self._end()
            raise InternalError("Schemas can't be compiled.") from None
        if not flag:
            self._end()
            self._unavailable = reason.decode(errors="replace")
            logger.warning("JSON schemas can't be enforced: %s", self._unavailable)
            raise GrammarsUnavailable(self._unavailable)
        return own_socket


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """The `Grammar` of a constraint: a process that has compiled it, and forks for each request."""

    process: ForkedProcess
    constraint: Constraint
    first: NDArray[np.bool_]
    """(vocabulary,) bool, the tokens that an answer may begin with."""
    size_bytes: int
    limits: GrammarLimits

    @property
    def is_alive(self) -> bool:
        return not self.process.has_hung_up

    def begin(self, count: int) -> list[RemoteMatcher]:
        """Matchers of the `count` answers of a request, which one process follows."""
        passed_socket = PassedSocket()
        with contextlib.suppress(OSError):  # the first token then fails
            self.process.begin(count, passed_socket)
        process = ForkedProcess(passed_socket, self.limits.memory_bytes)
        answers = AnswerProcess(process, self.limits.follow_seconds, count)
        return [RemoteMatcher(answers, i, self.constraint, self.first) for i in range(count)]


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Close the socket, which ends an idle process, and kill one busy with the vocabulary."""
    control.close()
    process.kill()
    process.wait()
