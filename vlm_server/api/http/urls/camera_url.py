"""A camera at an `https:` URL that the settings allow, followed by a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.types import Message, Receive

from vlm_server.errors import InvalidRequest
from vlm_server.platform.child import launch
from vlm_server.settings import Urls

_CHILD = "vlm_server.api.http.urls.camera_child"
_GRACE_SECONDS = 5.0
"""Time for the process to start, and between its own timeout and ours."""
_READ_BYTES = 64 << 10


class CameraJob(msgspec.Struct, frozen=True):
    """A URL to follow, of one of `hosts`; `seconds` until its headers are there."""

    url: str
    hosts: tuple[str, ...]
    seconds: float


class CameraHead(msgspec.Struct, frozen=True):
    """The Content-Type of what follows; or an error, the end of a sentence about the camera."""

    content_type: str
    error: str = ""


class CameraUrls:
    """Follows cameras. `child` is for tests: a module, and arguments after its job."""

    def __init__(self, urls: Urls, *child: str) -> None:
        self._urls = urls
        self._module, *self._arguments = child or (_CHILD,)

    def check(self) -> None:
        """Raises InvalidRequest if the settings allow no URL."""
        if not self._urls.https_hosts:
            raise _refusal("can't be used: this server fetches no `https:` URLs (urls.https_hosts)")

    @asynccontextmanager
    async def followed(self, url: str) -> AsyncIterator[tuple[str, Receive]]:
        """The Content-Type of the camera, and ASGI's `receive` of its body, until the block's end.

        Raises InvalidRequest.
        """
        self.check()
        job = CameraJob(url, self._urls.https_hosts, self._urls.timeout_seconds)
        words = launch.command(self._module, *self._arguments)
        async with launch.run_process(words, launch.environment()) as process:
            assert process.stdin is not None
            output = process.stdout
            assert output is not None
            # No argument, which is short, and which every user of the machine can read.
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            try:
                async with asyncio.timeout(job.seconds + _GRACE_SECONDS):
                    line = await output.readline()
                head = msgspec.json.decode(line, type=CameraHead)
            except (TimeoutError, ValueError):
                raise _refusal("can't be followed") from None
            if head.error:
                raise _refusal(head.error)

            is_over = False

            async def receive() -> Message:
                nonlocal is_over
                if is_over:  # no client is known here that could leave
                    await asyncio.Event().wait()
                data = await output.read(_READ_BYTES)
                is_over = not data
                return {"type": "http.request", "body": data, "more_body": bool(data)}

            yield head.content_type, receive


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(f"The camera at `url` {why}.", "url")
