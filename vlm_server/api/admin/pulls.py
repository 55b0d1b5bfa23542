"""Downloads started by operators, and their progress."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from vlm_server.errors import VlmServerError
from vlm_server.hub.download import fetch
from vlm_server.hub.messages import Progress
from vlm_server.hub.names import HubName
from vlm_server.settings import Settings

logger = logging.getLogger(__name__)

_TELL_SECONDS = 1.0
_RATE_SAMPLES = 10
"""Some five seconds."""


class Pulls:
    """The downloads in progress, by name. Used from the event loop only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: dict[str, Pull] = {}

    def start(self, name: HubName) -> Pull:
        """The download of `name`, started here if it is not in progress."""
        pull = self._running.get(str(name))
        if pull is None:
            pull = self._running[str(name)] = Pull(name, self._settings)
            pull.task.add_done_callback(lambda _: self._running.pop(str(name)))
        return pull

    def cancel(self, name: HubName) -> bool:
        """Cancel a download, keeping its files so far. Returns whether there was one."""
        pull = self._running.get(str(name))
        return pull is not None and pull.task.cancel()

    def to_json(self) -> list[dict[str, Any]]:
        """The latest line of each download in progress."""
        return [pull.news for pull in self._running.values()]


class Pull:
    """One download."""

    def __init__(self, name: HubName, settings: Settings) -> None:
        self._name = name
        self._settings = settings
        self._news = self._line("downloading")
        self._done_bytes = deque[tuple[float, int]](maxlen=_RATE_SAMPLES)
        """The last (monotonic time, bytes so far), from which the rate is computed."""
        self.task = asyncio.create_task(self._run())

    @property
    def news(self) -> dict[str, Any]:
        """The latest line of its progress."""
        return self._line("cancelled") if self.task.cancelled() else self._news

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines of progress: now, at most once a second while it changes, and at the end."""
        last_line = None
        while True:
            news = self.news
            if news != last_line:
                last_line = news
                yield json.dumps(news).encode() + b"\n"
            if news["state"] != "downloading":
                return
            await asyncio.wait((self.task,), timeout=_TELL_SECONDS)

    async def _run(self) -> None:
        try:
            await fetch(self._name, self._settings.model, self._settings.memory, self._take)
            self._news = self._line("done")
        except VlmServerError as error:
            self._news = self._line("failed", error=str(error))
        except Exception:
            logger.exception("downloading %s failed unexpectedly", self._name)
            self._news = self._line("failed", error="The server failed; its log says why.")

    def _take(self, progress: Progress) -> None:
        now = time.monotonic()
        self._done_bytes.append((now, progress.done_bytes))
        since, done_bytes = self._done_bytes[0]
        rate = (progress.done_bytes - done_bytes) / (now - since) if now > since else 0.0
        self._news = self._line(
            "downloading",
            file=progress.file,
            bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            bytes_per_second=max(0, round(rate)),
        )

    def _line(self, state: str, **more: str | int) -> dict[str, Any]:
        return {"state": state, "model": str(self._name), **more}
