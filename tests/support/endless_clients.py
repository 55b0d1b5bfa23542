"""Clients that never stop asking, each on a thread, while a test does something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager


@contextmanager
def on_threads(
    clients: Iterable[Callable[[threading.Event], object]], wait_seconds: float
) -> Iterator[None]:
    """Each client runs on a thread until the event that it is given is set: when the block ends.

    Each is then waited for, at most `wait_seconds`.
    """
    stop = threading.Event()
    threads = [threading.Thread(target=client, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(wait_seconds)


def wait_for_more(
    num_answered: Callable[[], int], failures: Sized, number: int, seconds: float
) -> None:
    """Wait until so many more requests were answered.

    Fails if that takes longer, or a request has failed.
    """
    wanted, deadline = num_answered() + number, time.monotonic() + seconds
    while num_answered() < wanted:
        assert not failures
        assert time.monotonic() < deadline
        time.sleep(0.05)
