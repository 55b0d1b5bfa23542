"""An engine without a model, `python -m tests.attack.scripted_worker FD`: each request's text says
what becomes of it.

    accept encode prefill token finish      events, in this order
    die stop hang cut                       SIGABRT, SIGSTOP, silence, an end of the socket alone
    hang-encoder hang-preparer              a piece of work without an end; the rest goes on
    deaf                                    reads no more
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import time

from vlm_server import heap
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
    MemoryStats,
    Ready,
    Stats,
    Submit,
    TextPart,
    Tokens,
    Usage,
    Working,
    decode_command,
    encode_message,
)

MEMORY = MemoryStats(0, 0, 0, 0, 0, 0, 0, {}, 0.0)
SIGN_SECONDS = 0.05


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.at_work: dict[str, int] = {}
        self.requests: set[str] = set()

    def run(self) -> None:
        self.read()
        self.send(Ready("scripted", "none", 4096))
        while True:
            if select.select([self.connection], [], [], SIGN_SECONDS)[0]:
                self.take(self.read())
            if self.requests or self.at_work:
                self.send(self.stats())

    def take(self, command: object) -> None:
        match command:
            case Submit():
                self.requests.add(command.request_id)
                for word in script_of(command).split():
                    self.do(word, command.request_id)
            case Abort(request_id) if request_id in self.requests:
                self.end(request_id, is_aborted=True)
            case Drain():
                os._exit(0)

    def do(self, word: str, name: str) -> None:
        match word:
            case "accept":
                self.send(Accepted(name))
            case "encode":
                self.send(Working((name,), (name,)))
            case "prefill":
                self.send(Working((name,)))
            case "token":
                self.send(Tokens((Delta(name, "text "),)))
            case "finish":
                self.send(Tokens((Delta(name, "", finish_reason="stop"),)))
                self.end(name)
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

    def end(self, name: str, *, is_aborted: bool = False) -> None:
        self.requests.discard(name)
        self.send(Working(()))
        self.send(Finished(name, Usage(1, 1), is_aborted))

    def stats(self) -> Stats:
        tracked = {"scheduler": len(self.requests)}
        return Stats({}, len(self.requests), tracked, MEMORY, 0, at_work=self.at_work)

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
    """The prompt, or the last text of the first message."""
    if isinstance(command.prompt, str):
        return command.prompt
    part = command.messages[0].content[-1]
    assert isinstance(part, TextPart)
    return part.text


if __name__ == "__main__":
    faulthandler.register(STACKS_SIGNAL)
    heap.share_one_heap()  # as the real engine does
    Worker(socket.socket(fileno=int(sys.argv[1]))).run()
