"""Clients that ask without pause and record every failure."""

from __future__ import annotations

import http.client
import json
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.support.endless_clients import on_threads, wait_for_more

_WAIT_SECONDS = 120.0


@dataclass
class Record:
    """The results of the requests; `failures` describes each that was not answered in full."""

    num_answered: int = 0
    failures: list[str] = field(default_factory=list)

    def wait_for_more(self, count: int = 8, seconds: float = 120.0) -> None:
        """Wait until `count` more requests were answered."""
        wait_for_more(lambda: self.num_answered, self.failures, count, seconds)


@contextmanager
def asking_clients(port: int) -> Iterator[Record]:
    """Four clients that ask continuously: two stream, two keep their connections."""
    record = Record()
    clients = [
        partial(_ask_on, port, record, stream, keep_alive)
        for stream in (False, True)
        for keep_alive in (False, True)
    ]
    with on_threads(clients, _WAIT_SECONDS + 5):
        yield record


def _ask_on(
    port: int, record: Record, stream: bool, keep_alive: bool, stop: threading.Event
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT_SECONDS)
    while not stop.is_set():
        if _is_closed(connection):
            connection.close()
        try:
            if fault := _ask(connection, stream):
                record.failures.append(fault)
            else:
                record.num_answered += 1
        except (OSError, http.client.HTTPException) as error:
            record.failures.append(repr(error))
        if record.failures or not keep_alive:
            connection.close()
        time.sleep(0.02)
    connection.close()


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed the connection; clients check before they reuse one."""
    return connection.sock is not None and bool(select.select([connection.sock], [], [], 0)[0])


def _ask(connection: http.client.HTTPConnection, stream: bool) -> str | None:
    """The failure of the answer, or None."""
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 24,
        "stream": stream,
        "messages": [{"role": "user", "content": "What shape is this? " * 5}],
    }
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        return f"{response.status} {data!r}"
    is_whole = data.endswith(b"data: [DONE]\n\n") if stream else b'"finish_reason":' in data
    return None if is_whole else f"cut off: {data[-200:]!r}"
