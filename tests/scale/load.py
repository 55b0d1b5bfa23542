"""Clients with a conversation each that ask without pause during failures."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from tests.scale.fleet import MODEL, WORKER, Fleet
from tests.support.endless_clients import on_threads, wait_for_more

_WAIT_SECONDS = 60.0


@dataclass
class Record:
    """The results of the requests: their workers, broken streams, and failures.

    A stream that has begun breaks; every other incomplete answer is a failure."""

    answered: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def wait_for_more(self, number: int = 8, seconds: float = 60.0) -> None:
        """Wait until `number` more requests were answered."""
        wait_for_more(self.answered.total, self.failures, number, seconds)

    def wait_for(self, worker: str, seconds: float = 60.0) -> None:
        """Wait until the worker has answered another request."""
        wait_for_more(lambda: self.answered[worker], self.failures, 1, seconds)


@contextmanager
def asking_clients(fleet: Fleet, num_clients: int = 4, max_tokens: int = 24) -> Iterator[Record]:
    """`num_clients` clients, every second of which streams; each has a key of its own."""
    record = Record()
    clients = [partial(_ask_on, fleet, record, i, max_tokens) for i in range(num_clients)]
    with on_threads(clients, _WAIT_SECONDS + 5):
        yield record


def _ask_on(
    fleet: Fleet, record: Record, number: int, max_tokens: int, stop: threading.Event
) -> None:
    turn = 0
    while not stop.is_set():
        turn += 1
        body = {
            "model": MODEL,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": bool(number % 2),
            "messages": [{"role": "user", "content": f"What is {number}? " * 5}],
        }
        connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=_WAIT_SECONDS)
        try:
            # Conversations change, so that all workers are asked.
            _ask(connection, body, f"client {number}, conversation {turn // 3}", record)
        except (OSError, http.client.HTTPException) as error:
            record.failures.append(repr(error))
        finally:
            connection.close()
        time.sleep(0.02)


def _ask(
    connection: http.client.HTTPConnection, body: dict[str, object], key: str, record: Record
) -> None:
    headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": key}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    has_begun = response.status == 200 and bool(body["stream"])
    try:
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        (record.broken if has_begun else record.failures).append(repr(error))
        return
    end = b"data: [DONE]\n\n" if has_begun else b'"finish_reason":'
    if response.status == 200 and end in data:
        record.answered[str(response.headers[WORKER])] += 1
    else:
        fault = f"{response.status} {data[-300:]!r}"
        (record.broken if has_begun else record.failures).append(fault)
