"""An encoded video to frames in memory, by way of a process of its own. Knows no codec.

What decodes hostile bytes may hang, crash or ask for all memory: it is a process that lives
for one video and is killed at its deadline. Its death costs that request alone.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import InvalidVideo
from vlm_server.ports import Cancellation
from vlm_server.protocol import Video
from vlm_server.settings import Video as Limits
from vlm_server.video.messages import Done, Frame, Job, Refused, read_answer, write

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "vlm_server.video.process")


@dataclass(frozen=True, slots=True)
class Clip:
    """What the model is shown of a video.

    frames: (count, height, width, 3) uint8 RGB, upright. seconds: when each of them is seen,
    counted from the first.
    """

    frames: NDArray[np.uint8]
    seconds: tuple[float, ...]


def decode(
    video: Video, limits: Limits, cancellation: Cancellation, command: tuple[str, ...] = _COMMAND
) -> Clip:
    """The frames of `video` that `limits` choose; `command` starts the process that decodes.

    Raises InvalidVideo for one that can't be read, is over a limit, takes too long or is stopped.
    """
    with _process(command, limits.decode_timeout_seconds) as (process, is_late):
        cancellation.on_cancel(process.kill)
        try:
            frames = _ask(process, Job(video.data, video.format, limits))
            pixels = np.stack([_upright(frame) for frame in frames])
        except ValueError:
            raise InvalidVideo("the video's frames have several sizes", video.param) from None
        except (EOFError, OSError, msgspec.DecodeError) as error:
            if not cancellation.is_cancelled:
                logger.warning("the decoder of a %s video ended early: %r", video.format, error)
            took_long = f"decoding the video takes over {limits.decode_timeout_seconds:g} seconds"
            reason = took_long if is_late.is_set() else "the video can't be decoded"
            raise InvalidVideo(reason, video.param) from None
        except _NotShown as error:
            raise InvalidVideo(str(error), video.param) from None
    return Clip(
        frames=pixels,
        seconds=tuple(frame.seconds for frame in frames),
    )


class _NotShown(Exception):
    """The process refused the video; the message is for the client."""


@contextmanager
def _process(
    command: tuple[str, ...], timeout_seconds: float
) -> Iterator[tuple[subprocess.Popen[bytes], threading.Event]]:
    """A process that is gone afterwards, and whether the deadline ended it."""
    is_late = threading.Event()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    )

    def end() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(timeout_seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield process, is_late
    finally:
        timer.cancel()
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was not written yet can't be any more
                pipe.close()  # type: ignore[union-attr]
        process.wait()


def _ask(process: subprocess.Popen[bytes], job: Job) -> list[Frame]:
    """All frames. Raises EOFError or OSError if the process dies, _NotShown if it refuses."""
    stdin: Any = process.stdin
    stdout: Any = process.stdout
    write(stdin, job)
    frames: list[Frame] = []
    while True:
        match read_answer(stdout):
            case Frame() as frame:
                frames.append(frame)
            case Refused(reason):
                raise _NotShown(reason)
            case Done():
                return frames


def _upright(frame: Frame) -> NDArray[np.uint8]:
    pixels = np.frombuffer(frame.rgb, np.uint8).reshape(frame.height, frame.width, 3)
    return np.rot90(pixels, frame.quarter_turns)
