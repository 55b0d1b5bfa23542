"""The process of a rank other than 0, `python -m vlm_server.engine.follower`.

Reads its `Rank` from standard input, one line of JSON; ends when standard input does.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from typing import NoReturn

import msgspec

from vlm_server.errors import ModelLoadError
from vlm_server.platform import backend, heap, log_lines
from vlm_server.platform.footprint import be_killed_first
from vlm_server.protocol import STACKS_SIGNAL
from vlm_server.protocol.commands import Rank

logger = logging.getLogger(__name__)


def main() -> NoReturn:
    """Follow rank 0 until it or the parent process ends."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    be_killed_first()
    heap.share_one_heap()
    rank = msgspec.json.decode(sys.stdin.buffer.readline(), type=Rank)
    threading.Thread(target=_end_with_input, daemon=True).start()
    log_lines.set_up(rank.log.level, rank.log.format, f"rank {rank.number}")
    rank.enter()
    try:
        from vlm_server.runner.device.device import current_device
        from vlm_server.runner.distributed.follower import follow

        follow(rank, current_device())
    except ImportError as error:
        logger.critical(backend.not_loaded(error))
    except ModelLoadError as error:
        logger.critical("%s", error)
    except BaseException:
        logger.critical("this rank can't go on", exc_info=True)
    os._exit(1)


def _end_with_input() -> NoReturn:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
