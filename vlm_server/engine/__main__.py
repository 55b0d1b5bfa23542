"""The engine process, `python -m vlm_server.engine FD`: starts an engine and runs it.

Its main thread loads the model and runs it, a reader fills the inbox, a writer empties the outbox.
It ends with the front. Knows the socket's number and the order of ending.
"""

from __future__ import annotations

import faulthandler
import logging
import socket
import sys
from typing import NoReturn

from vlm_server.engine.channel import Channel, LogToFront
from vlm_server.errors import ModelLoadError
from vlm_server.platform import backend, heap, log_lines
from vlm_server.platform.footprint import be_killed_first
from vlm_server.protocol import LAST_WRITES_SECONDS, STACKS_SIGNAL, Unloadable

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005
"""The maximum time that a preparer thread may hold the interpreter."""


def main() -> NoReturn:
    """Serve the front at the socket whose number is the first argument, until it ends."""
    faulthandler.enable()  # the log then says where it crashed
    faulthandler.register(STACKS_SIGNAL)
    be_killed_first()
    heap.share_one_heap()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    start = channel.open()
    log_lines.set_up(start.log.level, start.log.format, "engine", LogToFront(channel))
    sys.setswitchinterval(_SWITCH_SECONDS)
    if start.rank is not None:
        start.rank.enter()
    try:
        from vlm_server.engine.start import start_engine  # imports mlx, which may lack its backend

        loop, caches = start_engine(start, channel)
    except ImportError as error:
        logger.debug("loading failed", exc_info=True)
        channel.send(Unloadable(backend.not_loaded(error)))
        channel.end(1)
    except Exception as error:  # a checkpoint can be wrong in unknown ways
        known = isinstance(error, ModelLoadError)
        logger.log(logging.DEBUG if known else logging.ERROR, "loading failed", exc_info=True)
        channel.send(Unloadable(str(error)))
        channel.end(1)
    try:
        loop.run()
    except BaseException:
        logger.critical("the engine can't go on", exc_info=True)
        channel.end(1)
    caches.close(LAST_WRITES_SECONDS)
    channel.end(0)


if __name__ == "__main__":
    main()
