"""The process that follows a camera at an `https:` URL: it copies the body to standard output.

A first line of JSON, `CameraHead`, says what follows. Started by `camera_url`, which kills it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading

import httpx
import msgspec

from vlm_server.api.http.urls.camera_url import CameraHead, CameraJob
from vlm_server.api.http.urls.fetch import Fetcher, FetchError, default_context
from vlm_server.platform.footprint import be_killed_first

_MEMORY_BYTES = 1 << 30


async def follow(job: CameraJob, fetcher: Fetcher) -> None:
    """Write the head and the body of the response; an error in place of the head."""
    try:
        async with asyncio.timeout(job.seconds) as deadline, fetcher.opened(job.url) as response:
            deadline.reschedule(None)
            _write(_line(CameraHead(response.headers.get("content-type", ""))))
            assert isinstance(response.stream, httpx.AsyncByteStream)
            async for received in response.stream:
                _write(received)
    except FetchError as error:
        _write(_line(CameraHead("", str(error))))
    except TimeoutError:
        _write(_line(CameraHead("", f"did not answer within {job.seconds:g} seconds")))


def main(fetcher: Fetcher | None = None) -> None:
    """Follow the camera of the job in the first line of the input. `fetcher` is for tests."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    be_killed_first()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=CameraJob)
    threading.Thread(target=_end_with_front, daemon=True).start()
    asyncio.run(follow(job, fetcher or Fetcher(job.hosts, context=default_context())))


def _end_with_front() -> None:
    """End this process when its standard input ends, also while the camera is silent."""
    os.read(0, 1)
    os._exit(1)


def _line(head: CameraHead) -> bytes:
    return msgspec.json.encode(head) + b"\n"


def _write(data: bytes) -> None:
    """Write all of `data`; a front that does not read holds up the camera."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
