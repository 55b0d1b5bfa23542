"""An engine without a model, `python -m tests.support.scripted_worker FD`.

Each request's text is the script of its answer:

    accept encode prefill token finish      events, in this order
    wait                                    nothing
    encode-on                               as encode, and it goes on when nobody waits for it
    die stop hang cut                       SIGABRT, SIGSTOP, silence, an end of the socket alone
    hang-encoder hang-preparer              a piece of work without an end; the rest goes on
    deaf                                    reads no more
    say SECONDS TEXT                        the text, in pieces with that pause between them

The last two messages count for `say`: an answer that is continued gets the rest of the text.

A text that begins with none of these is a question: all choices of its answer get a token in each
step, up to their limit.

A model whose name is `slow` is loaded for ever. One in whose folder the file `unloadable` says
something can't be loaded.
"""

from __future__ import annotations

import faulthandler
import os
import re
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from vlm_server.platform import heap
from vlm_server.protocol import (
    ENCODER,
    MESSAGE_HEADER,
    PREPARERS,
    STACKS_SIGNAL,
    Abort,
    Accepted,
    Delta,
    Drain,
    Event,
    Finished,
    Loading,
    MemoryStats,
    ModelFacts,
    OnDevice,
    Ready,
    SetMemoryLimit,
    Start,
    Stats,
    Submit,
    TextPart,
    TokenLogprob,
    Tokens,
    TokenText,
    Unloadable,
    Usage,
    decode_command,
    encode_message,
)

SIGN_SECONDS = 0.05
STEP_SECONDS = 0.002
CONTEXT_TOKENS = 100_000
TEXT = "text "
SLOW, UNLOADABLE = "slow", "unloadable"
_EVENTS = ("accept", "encode", "prefill", "token", "finish")
_DEEDS = ("wait", "encode-on", "die", "stop", "hang", "cut", "deaf")
_HANGS = ("hang-encoder", "hang-preparer")
WORDS = frozenset((*_EVENTS, *_DEEDS, *_HANGS))


@dataclass
class Answer:
    """The answer to a question: how many tokens each choice has, and how many it gets."""

    num_choices: int
    limit: int
    logprobs: tuple[TokenLogprob, ...]
    done: int = 0
    pieces: tuple[str, ...] = ()
    """What it says, if not `TEXT` up to the limit."""
    pause_seconds: float = 0.0
    next_at: float = 0.0


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.at_work: dict[str, int] = {}
        self.requests: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self.encoding: set[str] = set()
        self.num_tokens = 0
        self.limit_bytes = 0
        self.is_draining = False
        self.is_told_idle = False

    def run(self) -> None:
        start = self.read()
        assert isinstance(start, Start)
        self.limit_bytes = start.memory.known_limit_bytes
        self.send(Loading("loading the weights", 0.1))
        if start.model.name == SLOW:
            self.read()
        told = Path(start.model.path, UNLOADABLE)
        if told.exists() and (reason := told.read_text()):
            self.send(Unloadable(reason))
            return
        facts = ModelFacts(family="scripted", context_tokens=CONTEXT_TOKENS)
        self.send(Ready("scripted", "none", CONTEXT_TOKENS, facts))
        said = 0.0
        while True:
            pause = STEP_SECONDS if self.answers else SIGN_SECONDS
            if select.select([self.connection], [], [], pause)[0]:
                self.take(self.read())
            self.step()
            is_idle = not (self.requests or self.at_work)
            if time.monotonic() - said > SIGN_SECONDS and not (is_idle and self.is_told_idle):
                self.send(self.stats())
                said, self.is_told_idle = time.monotonic(), is_idle
            if self.is_draining and not self.requests:
                os._exit(0)

    def take(self, command: object) -> None:
        match command:
            case Submit():
                self.requests.add(command.request_id)
                if speech := speech_of(command):
                    self.begin(command, *speech)
                    return
                words = script_of(command).split()
                if not WORDS.intersection(words[:1]):
                    self.begin(command)
                    return
                for word in words:
                    self.do(word, command.request_id)
            case Abort(request_id) if request_id in self.requests:
                self.end(request_id, Usage(1, 1), is_aborted=True)
            case SetMemoryLimit(limit_bytes):
                self.limit_bytes, self.is_told_idle = limit_bytes, False
            case Drain():
                self.is_draining = True

    def do(self, word: str, name: str) -> None:
        match word:
            case "accept":
                self.send(Accepted(name))
            case "encode":
                self.send(OnDevice(encoding=(name,)))
            case "encode-on":
                self.send(OnDevice(encoding=(name,)))
                self.encoding.add(name)
            case "prefill":
                self.send(OnDevice((name,)))
            case "token":
                self.send(Tokens((Delta(name, TEXT),)))
            case "finish":
                self.send(Tokens((Delta(name, "", finish_reason="stop"),)))
                self.end(name, Usage(1, 1))
            case "die":
                os.kill(os.getpid(), signal.SIGABRT)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang" | "deaf":
                time.sleep(1000)
            case "cut":
                self.connection.shutdown(socket.SHUT_RDWR)
                time.sleep(1000)
            case "hang-encoder":
                self.at_work[ENCODER] = 1
            case "hang-preparer":
                self.at_work[PREPARERS] = 1

    def begin(
        self, command: Submit, pieces: tuple[str, ...] = (), pause_seconds: float = 0.0
    ) -> None:
        name, sampling = command.request_id, command.sampling
        token = TokenText(TEXT, -1.0)
        entry = TokenLogprob(token, (token,) * (sampling.logprobs or 0))
        entries = () if sampling.logprobs is None else (entry,)
        limit = sampling.max_tokens or CONTEXT_TOKENS
        self.answers[name] = Answer(
            sampling.n, limit, entries, pieces=pieces, pause_seconds=pause_seconds
        )
        self.send(Accepted(name))
        if command.images:
            self.send(OnDevice(encoding=(name,)))
        self.send(OnDevice((name,)))

    def step(self) -> None:
        """A token for each choice of each answer."""
        if not self.answers:
            return
        deltas = []
        ended = []
        for name, answer in self.answers.items():
            if answer.next_at > time.monotonic():
                continue
            answer.next_at = time.monotonic() + answer.pause_seconds
            answer.done += 1
            text = answer.pieces[answer.done - 1] if answer.pieces else TEXT
            is_whole = answer.done == len(answer.pieces)
            is_last = is_whole or answer.done == answer.limit
            reason = None if not is_last else "stop" if is_whole else "length"
            deltas += [
                Delta(name, text, answer.logprobs, choice, reason)
                for choice in range(answer.num_choices)
            ]
            if is_last:
                ended.append((name, Usage(1, answer.num_choices * answer.done)))
        self.num_tokens += len(deltas)
        if deltas:
            self.send(Tokens(tuple(deltas)))
        for name, usage in ended:
            self.end(name, usage)

    def end(self, name: str, usage: Usage, *, is_aborted: bool = False) -> None:
        self.requests.discard(name)
        self.answers.pop(name, None)
        if name not in self.encoding:
            self.send(OnDevice())
        self.send(Finished(name, usage, is_aborted))

    def stats(self) -> Stats:
        states = {"decode": len(self.answers)}
        tracked = {"scheduler": len(self.requests)}
        memory = MemoryStats(0, 0, 0, self.limit_bytes, 0, 0, 0, {}, 0.0)
        return Stats(
            states, len(self.requests), tracked, memory, self.num_tokens, at_work=self.at_work
        )

    def send(self, event: Event) -> None:
        self.connection.sendall(encode_message(event))

    def read(self) -> object:
        (length,) = MESSAGE_HEADER.unpack(self.exactly(MESSAGE_HEADER.size))
        return decode_command(self.exactly(length))

    def exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        filled = 0
        with memoryview(data) as view:
            while filled < size:
                count = self.connection.recv_into(view[filled:])
                if not count:
                    os._exit(0)
                filled += count
        return data


def script_of(command: Submit) -> str:
    """The prompt, or the last text of the first message; empty if there is none."""
    if isinstance(command.prompt, str):
        return command.prompt
    parts = command.messages[0].content if command.messages else ()
    return next((part.text for part in reversed(parts) if isinstance(part, TextPart)), "")


def speech_of(command: Submit) -> tuple[tuple[str, ...], float] | None:
    """The pieces that a `say` asks for, and the pause between them in seconds."""
    texts = [
        "".join(part.text for part in message.content if isinstance(part, TextPart))
        for message in command.messages[-2:]
    ]
    said, begun = texts[-1] if texts else "", ""
    if len(texts) == 2 and not said.startswith("say "):
        said, begun = texts
    match = re.fullmatch(r"say ([\d.]+) (.*)", said, re.DOTALL)
    if match is None:
        return None
    pause_seconds, text = float(match[1]), match[2].removeprefix(begun)
    pieces = re.findall(r"\s*\S+\s*$|\s*\S+" if pause_seconds else r"(?s).{1,400}", text)
    return tuple(pieces) or ("",), pause_seconds


if __name__ == "__main__":
    faulthandler.register(STACKS_SIGNAL)
    heap.share_one_heap()  # as the real engine does
    Worker(socket.socket(fileno=int(sys.argv[1]))).run()
