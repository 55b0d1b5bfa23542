"""Failing workers behind a gateway: clients notice as little as possible."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import httpx
import openai
import pytest

from scripts.scale_out import get
from tests.scale.fleet import MODEL, WORKER, Fleet, Gateway
from tests.scale.load import asking_clients
from tests.scale.proxies import HAProxy
from tests.support.daemons import Daemon, wait_until

pytestmark = pytest.mark.xdist_group("scale")

LONG = 6000


def test_killed_worker_breaks_only_its_own_streams(fleet: Fleet) -> None:
    victim, other = fleet.daemons
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "Go on"}], "stream": True}
    keys = {url: fleet.key_for(url) for url in (victim, other)}
    streams = {
        url: fleet.client().chat.completions.create(
            **fields, max_tokens=LONG, extra_headers={"X-SMG-Routing-Key": key}
        )
        for url, key in keys.items()
    }
    assert streams[victim].response.headers[WORKER] == victim
    for stream in streams.values():
        next(stream)
    with asking_clients(fleet) as record:
        record.wait_for_more()
        fleet.daemons.kill(victim)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(streams[victim])  # it ends with an error, not silently
        record.wait_for_more(16)
    next(streams[other])
    streams[other].close()
    assert record.failures == []
    assert fleet.worker_of(keys[victim]) == other
    fleet.restart_daemon(victim)
    assert fleet.worker_of(keys[victim]) == victim


@pytest.mark.parametrize("name", ["gateway", "nginx"])  # HAProxy now and then passes on one 503
def test_rolling_restart_under_load_fails_no_request(
    name: str, request: pytest.FixtureRequest
) -> None:
    fleet: Fleet = request.getfixturevalue(name)
    fleet.wait_for_workers()
    with asking_clients(fleet) as record:
        for url in list(fleet.daemons):
            record.wait_for_more()
            fleet.restart_daemon(url)
            record.wait_for(url)
    assert (record.failures, record.broken) == ([], [])
    assert set(record.answered) == set(fleet.daemons)


@pytest.mark.parametrize("name", ["gateway", "nginx"])  # HAProxy now and then fails one request
def test_dead_engine_behind_gateway_fails_no_request(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The front lives, and answers 502 and 503 until it has another engine."""
    fleet: Fleet = request.getfixturevalue(name)
    fleet.wait_for_workers()
    url = next(iter(fleet.daemons))
    with asking_clients(fleet) as record:
        record.wait_for_more()
        fleet.daemons[url].kill_engine()
        record.wait_for_more(16)
    assert record.failures == []
    fleet.daemons[url].wait_ready()
    fleet.wait_for_workers()


@pytest.mark.parametrize("name", ["gateway", "haproxy"])
def test_stopped_worker_gets_no_requests_until_it_continues(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The worker's health check times out."""
    fleet: Fleet = request.getfixturevalue(name)
    fleet.wait_for_workers()
    still, other = fleet.daemons
    key = fleet.key_for(still)
    pid = fleet.daemons[still].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        fleet.wait_for_workers(1, 30)
        start = time.monotonic()
        assert fleet.worker_of(key) == other
        assert time.monotonic() - start < 5
    finally:
        os.kill(pid, signal.SIGCONT)
    fleet.wait_for_workers(2, 30)
    assert fleet.worker_of(key) == still


@contextmanager
def slow_engine(daemon: Daemon) -> Iterator[None]:
    """The engine runs a twentieth of the time, as on a busy machine."""
    pid, stop = daemon.engine_pid(), threading.Event()

    def hold() -> None:
        while not stop.is_set():
            os.kill(pid, signal.SIGSTOP)
            stop.wait(0.38)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def suspended_engine(daemon: Daemon) -> Iterator[None]:
    """The engine is suspended; the front accepts requests and reports how many wait."""
    pid = daemon.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_gateway_avoids_worker_with_many_waiting_requests(gateway: Gateway) -> None:
    """The waiting requests are answered by the same worker once it continues."""
    slow, other = gateway.daemons
    key = gateway.key_for(slow)
    with ThreadPoolExecutor(64) as threads:

        def is_left_out() -> bool:
            futures.append(threads.submit(gateway.worker_of, key))
            return (
                futures[-1] in wait(futures[-1:], timeout=1).done and futures[-1].result() == other
            )

        def all_are_seen() -> bool:
            return sum(future.done() for future in futures) + num_waiting(slow) == len(futures)

        with suspended_engine(gateway.daemons[slow]):
            futures = [threads.submit(gateway.worker_of, key) for _ in range(48)]
            wait_until(lambda: num_waiting(slow) >= 16, 10, gateway.log)
            wait_until(is_left_out, 10, gateway.log)  # it asks every second
            wait_until(all_are_seen, 10, gateway.log)
            waiting = num_waiting(slow)
        assert Counter(future.result() for future in futures)[slow] == waiting >= 16
    wait_until(lambda: gateway.worker_of(key) == slow, 10, gateway.log)


def num_waiting(url: str) -> int:
    """The number of requests that the daemon has not begun."""
    return int(get(f"{url}/v1/loads")["loads"][0]["num_waiting_reqs"])


def test_haproxy_sends_slow_worker_fewer_requests(haproxy: HAProxy) -> None:
    """Of eight clients with the slow worker's key, at most three quarters are there at once."""
    slow, other = haproxy.daemons
    key = haproxy.key_for(slow)
    answered = Counter[str]()
    with ThreadPoolExecutor(8) as threads, slow_engine(haproxy.daemons[slow]):
        crowd = [threads.submit(haproxy.worker_of, key, 32) for _ in range(40)]
        answered = Counter(future.result() for future in crowd)
    print(f"of 40 requests with its key, a slow worker answered {answered[slow]}")
    assert 0 < answered[slow] < answered[other]
    assert haproxy.worker_of(key) == slow
