"""Streams that are cut on their way through gateways, and resumed there with the same key."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.scale.fleet import MODEL, WORKER, Fleet, Gateway
from tests.scale.proxies import HAProxy, Nginx
from tests.support.daemons import wait_until

pytestmark = pytest.mark.xdist_group("scale")

NUM_TOKENS = 200
_EVENT = re.compile(r"data: (.*)\nid: (.*)\n\n")


def pieces(fleet: Fleet, key: str, **headers: str) -> Iterator[tuple[httpx.Response, str]]:
    """The pieces of a streamed answer, with its response."""
    message = {"role": "user", "content": "Go on"}
    body = {"model": MODEL, "messages": [message], "max_tokens": NUM_TOKENS, "stream": True}
    with httpx.stream(
        "POST",
        f"{fleet.url}/v1/chat/completions",
        json={**body, "ignore_eos": True, "seed": 1, "temperature": 0},
        headers={"X-SMG-Routing-Key": key, **headers},
        timeout=60,
    ) as response:
        if response.status_code != 200:
            yield response, response.read().decode()
            return
        for text in response.iter_text():
            yield response, text


@pytest.fixture(params=["nginx", "haproxy"])
def proxy(request: pytest.FixtureRequest) -> Fleet:
    """The proxies that pass on all headers."""
    fleet: Nginx | HAProxy = request.getfixturevalue(request.param)
    fleet.wait_for_workers()
    return fleet


def test_cut_stream_is_resumed_at_its_worker(proxy: Fleet) -> None:
    key = proxy.key_for(next(iter(proxy.daemons)))
    begun, worker = "", ""
    for response, text in pieces(proxy, key, **{"X-VLM-Resumable": "true"}):
        begun, worker = begun + text, response.headers[WORKER]
        if len(_EVENT.findall(begun)) >= 5:
            break
    begun = begun[: begun.rindex("\n\n") + 2]
    _, last_id = _EVENT.findall(begun)[-1]
    rest = ""
    for response, text in pieces(proxy, key, **{"Last-Event-ID": last_id}):
        assert response.status_code == 200, text
        assert response.headers[WORKER] == worker
        rest += text
    events = [data for data, _ in _EVENT.findall(begun) + _EVENT.findall(rest)]
    assert events.count("[DONE]") == 1
    assert len({event_id for _, event_id in _EVENT.findall(begun + rest)}) == len(events)
    numbers = [int(event_id.rpartition(":")[2]) for _, event_id in _EVENT.findall(begun + rest)]
    assert numbers == list(range(len(numbers)))
    whole = "".join(text for _, text in pieces(proxy, key))
    assert whole.count("\ndata: ") + 1 >= len(numbers) > 10

    def is_idle() -> bool:
        return not any(
            daemon.status()["requests"]["in_flight"] for daemon in proxy.daemons.values()
        )

    wait_until(is_idle, 10, proxy.log)


def test_stream_is_unknown_at_another_worker(proxy: Fleet) -> None:
    key, other = (proxy.key_for(url) for url in proxy.daemons)
    begun = ""
    for _, text in pieces(proxy, key, **{"X-VLM-Resumable": "true"}):
        begun += text
    _, last_id = _EVENT.findall(begun)[0]
    ((response, text),) = pieces(proxy, other, **{"Last-Event-ID": last_id})
    assert (response.status_code, "no such stream" in text) == (404, True)


def test_gateway_drops_wish_for_resumable_stream(gateway: Gateway) -> None:
    """It passes on few headers: the stream is an ordinary one, without ids."""
    gateway.wait_for_workers()
    whole = "".join(text for _, text in pieces(gateway, "a key", **{"X-VLM-Resumable": "true"}))
    assert whole.endswith("data: [DONE]\n\n")
    assert "id: " not in whole.replace('"id": ', "")
