"""The engine process: wires engine and runner to the socket that the front left open.

Knows threads, the protocol and the order of starting; knows no HTTP. Started as
`python -m vlm_server.worker FD`. Its main thread loads the model and runs it, a reader thread
fills the inbox, a writer thread empties the outbox. When the front is gone, so is it.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from queue import SimpleQueue
from typing import NoReturn

from vlm_server import heap
from vlm_server.caches import Caches
from vlm_server.engine.admission import Admission
from vlm_server.engine.governor import Governor
from vlm_server.engine.limits import SchedulerConfig
from vlm_server.engine.loop import EngineLoop, Inbox
from vlm_server.engine.scheduler import Scheduler
from vlm_server.errors import ModelLoadError
from vlm_server.protocol import (
    FRAME_HEADER,
    LAST_WRITES_SECONDS,
    Abort,
    Command,
    Drain,
    Event,
    Loading,
    Ready,
    Start,
    Submit,
    Unloadable,
    Working,
    decode_command,
    encode_frame,
)
from vlm_server.runner.disk_cache import open_disk_cache
from vlm_server.runner.encoder import ImageEncoder
from vlm_server.runner.grammar import Grammars
from vlm_server.runner.loading import LoadedModel, load
from vlm_server.runner.memory import MlxMemory, device_name, make_caches
from vlm_server.runner.model_runner import ModelRunner
from vlm_server.runner.preparer import MultimodalPreparer
from vlm_server.runner.speed import warn_of_slow_products
from vlm_server.warm_up import stages, warm_up

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005
"""How long a thread that prepares a picture may keep the decode loop from the interpreter."""
_ANNOUNCE_SECONDS = 0.1
"""How long work waits to be announced to a front that does not read."""


def main() -> NoReturn:
    """Serve the front at the socket whose number is the first argument, until it ends."""
    heap.share_one_heap()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    start = channel.open()
    logging.basicConfig(
        level=start.log.level.upper(), format="%(asctime)s engine %(levelname)s %(message)s"
    )
    logging.getLogger("PIL").setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        loop, caches = start_engine(start, channel)
    except Exception as error:  # a checkpoint can be wrong in more ways than are known
        known = isinstance(error, ModelLoadError)
        logger.log(logging.DEBUG if known else logging.ERROR, "loading failed", exc_info=True)
        channel.send(Unloadable(str(error)))
        channel.end(1)
    try:
        loop.run()
    except BaseException:
        logger.critical("the engine can't go on", exc_info=True)
        channel.end(1)
    caches.disk.close(LAST_WRITES_SECONDS)
    channel.end(0)


def start_engine(start: Start, channel: Channel) -> tuple[EngineLoop, Caches]:
    """Load, warm up and say `Ready`. Raises ModelLoadError."""
    channel.send(Loading("loading the weights", 0.1))
    loaded = load(start.model)
    memory = MlxMemory(start.memory)
    caches = make_caches(start.cache, memory, loaded.language_model)
    loop = build_loop(start, loaded, memory, caches, channel)
    for number, stage in enumerate(stages(with_video=loaded.video_token_id is not None)):
        channel.send(Loading(f"warming up on {stage.name}", 0.5 + 0.1 * number))
        warm_up(loop, stage)
    loop.begin_anew()
    caches.disk = open_disk_cache(start.cache, loaded.fingerprint, caches.prefixes)
    loop.send = channel.send
    warn_of_slow_products()
    gc.collect()
    gc.freeze()  # else each full collection goes through all of it: 30 ms in somebody's answer
    channel.send(Ready(loaded.model_type, device_name(), loaded.context_tokens))
    return loop, caches


def build_loop(
    start: Start, loaded: LoadedModel, memory: MlxMemory, caches: Caches, channel: Channel
) -> EngineLoop:
    """The engine around a loaded model."""
    config = SchedulerConfig(
        max_num_seqs=start.scheduler.max_num_seqs,
        prefill_chunk_tokens=start.scheduler.prefill_chunk_tokens,
        max_step_seconds=start.scheduler.max_step_seconds,
        max_preparing=start.scheduler.preparer_threads,
        context_tokens=loaded.context_tokens,
        vocabulary_size=loaded.vocabulary_size,
        eos_token_ids=loaded.eos_token_ids,
        default_temperature=loaded.default_temperature,
        default_top_p=loaded.default_top_p,
    )
    grammars = Grammars(loaded, start.engine.schema_timeout_seconds)
    governor, runner = Governor(start.memory, memory, caches), ModelRunner(loaded, caches)
    admission = Admission(governor, runner.kv_bytes, config.prefill_chunk_tokens)
    return EngineLoop(
        inbox=channel.inbox,
        scheduler=Scheduler(config, loaded.backend, caches, admission),
        runner=runner,
        preparer=MultimodalPreparer(loaded, start.video, grammars, caches),
        encoder=ImageEncoder(loaded.model),
        governor=governor,
        send=channel.send,
        preparer_threads=start.scheduler.preparer_threads,
        max_failed_steps=start.engine.max_failed_steps,
    )


class Channel:
    """Frames over the front's socket; sending never waits long for the front to read.

    Ends the process when the front is gone, at whatever byte and also while a model loads:
    nobody is left to serve.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._incoming = connection.makefile("rb")
        self.inbox: Inbox = SimpleQueue()
        self._outbox: SimpleQueue[Event | threading.Event | None] = SimpleQueue()
        """Events, what is set once those before it are written, and None for the end."""
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def open(self) -> Start:
        """The first command. Those after it go to the inbox as they come."""
        start = self._receive()
        assert isinstance(start, Start)
        threading.Thread(target=self._read_on, daemon=True).start()
        return start

    def send(self, event: Event) -> None:
        """Send an event some time soon; what the device works on is in the socket at once."""
        self._outbox.put(event)
        if isinstance(event, Working) and event.request_ids:
            written = threading.Event()
            self._outbox.put(written)
            written.wait(_ANNOUNCE_SECONDS)

    def end(self, status: int) -> NoReturn:
        """End the process once all that was sent is on its way.

        Waits for no other thread: one may sit in a picture or in a read.
        """
        self._outbox.put(None)
        self._writer.join()
        os._exit(status)

    def _receive(self) -> Command:
        (length,) = FRAME_HEADER.unpack(self._read(FRAME_HEADER.size))
        return decode_command(self._read(length))

    def _read_on(self) -> NoReturn:
        try:
            while True:
                command = self._receive()
                assert isinstance(command, Submit | Abort | Drain)
                self.inbox.put(command)
        except Exception:
            logger.critical("the front can't be understood", exc_info=True)
            os._exit(1)

    def _read(self, size: int) -> bytes:
        try:
            data = self._incoming.read(size)
        except OSError:  # a front that is killed with events unread resets the socket
            os._exit(0)
        if len(data) < size:
            os._exit(0)
        return data

    def _write(self) -> None:
        try:
            while (entry := self._outbox.get()) is not None:
                if isinstance(entry, threading.Event):
                    entry.set()
                else:
                    self._connection.sendall(encode_frame(entry))
        except OSError:
            os._exit(0)
        except Exception:
            logger.critical("an event can't be sent", exc_info=True)
            os._exit(1)


if __name__ == "__main__":
    main()
