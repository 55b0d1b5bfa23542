"""Decodes a video to frames in memory, in a child process of its own.

A decoder that is given hostile bytes may hang, crash or allocate all memory. So each video gets
its own process, which is killed at a deadline; if it dies, only that request fails.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.child import launch
from vlm_server.child.cancellation import Cancellation
from vlm_server.errors import InvalidVideo
from vlm_server.protocol import Video
from vlm_server.settings import Video as Limits
from vlm_server.video.messages import Done, Frame, Job, Refused, read_answer, write

logger = logging.getLogger(__name__)

_COMMAND = tuple(launch.command("vlm_server.video.process"))


@dataclass(frozen=True, slots=True)
class Clip:
    """The frames of a video that the model sees.

    frames: (count, height, width, 3) uint8 RGB, upright. seconds: the time of each of them,
    counted from the first.
    """

    frames: NDArray[np.uint8]
    seconds: tuple[float, ...]


def decode(
    video: Video, limits: Limits, cancellation: Cancellation, command: tuple[str, ...] = _COMMAND
) -> Clip:
    """The frames of `video` at the rate and size of `limits`; `command` starts the decoder.

    Raises InvalidVideo if it can't be decoded, is over a limit, takes too long or is cancelled.
    """
    with _process(command, limits.decode_timeout_seconds) as (process, is_late):
        cancellation.on_cancel(process.kill)
        try:
            frames = _ask(process, Job(video.data, video.format, limits))
            pixels = np.stack([_upright(frame) for frame in frames])
        except ValueError:
            raise InvalidVideo("The video's frames differ in size.", video.param) from None
        except (EOFError, OSError, msgspec.DecodeError) as error:
            if not cancellation.is_cancelled:
                logger.warning("the process that decodes a %s video died: %r", video.format, error)
            seconds = limits.decode_timeout_seconds
            took_long = f"Decoding the video takes over {seconds:g} seconds."
            reason = took_long if is_late.is_set() else "The video can't be decoded."
            raise InvalidVideo(reason, video.param) from None
        except _NotDecoded as error:
            raise InvalidVideo(str(error), video.param) from None
    return Clip(
        frames=pixels,
        seconds=tuple(frame.seconds for frame in frames),
    )


class _NotDecoded(Exception):
    """The decoder refused the video; the message is for the client."""


@contextmanager
def _process(
    command: tuple[str, ...], timeout_seconds: float
) -> Iterator[tuple[subprocess.Popen[bytes], threading.Event]]:
    """A process, killed afterwards, and whether the deadline killed it."""
    is_late = threading.Event()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=launch.environment(),
        cwd=launch.FOLDER,
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
            with suppress(OSError):  # the rest of the job can't be written any more
                pipe.close()  # type: ignore[union-attr]
        process.wait()


def _ask(process: subprocess.Popen[bytes], job: Job) -> list[Frame]:
    """All frames. Raises EOFError or OSError if the process dies, _NotDecoded if it refuses."""
    stdin: Any = process.stdin
    stdout: Any = process.stdout
    write(stdin, job)
    frames: list[Frame] = []
    while True:
        match read_answer(stdout):
            case Frame() as frame:
                frames.append(frame)
            case Refused(reason):
                raise _NotDecoded(reason)
            case Done():
                return frames


def _upright(frame: Frame) -> NDArray[np.uint8]:
    pixels = np.frombuffer(frame.rgb, np.uint8).reshape(frame.height, frame.width, 3)
    return np.rot90(pixels, frame.quarter_turns)
