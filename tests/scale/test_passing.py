"""Streams, large bodies and earlier responses pass gateways unchanged."""

from __future__ import annotations

import base64
import io
import time
import zlib
from itertools import pairwise

import openai
import pytest

from tests.scale.fleet import MODEL, WORKER, Fleet, Gateway
from tests.scale.proxies import HAProxy, Nginx
from tests.support.daemons import wait_until
from tests.support.images import noise

pytestmark = pytest.mark.xdist_group("scale")

MIB = 1024**2


def chunk_gaps(client: openai.OpenAI, num_tokens: int) -> list[float]:
    """The seconds before each chunk of a streamed answer."""
    start = time.monotonic()
    times = [start]
    with client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Go on"}],
        max_tokens=num_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"X-SMG-Routing-Key": "a stream"},
    ) as stream:
        times += [time.monotonic() for _ in stream]
    return [after - before for before, after in pairwise(times)]


def arrive_separately(found: list[float]) -> bool:
    """Whether no chunk waits for many others, and few arrive together."""
    middle = sorted(found)[len(found) // 2]
    are_apart = sum(gap > middle / 10 for gap in found) > len(found) / 2
    return middle > 0.001 and are_apart and max(found) < sum(found) / 4


def test_gateways_do_not_buffer_streams(fleet: Fleet) -> None:
    """One of several tries must succeed: on a busy machine chunks may merge anywhere."""
    chunk_gaps(fleet.client(), 8)
    assert any(arrive_separately(chunk_gaps(fleet.client(), 400)) for _ in range(10))


def test_disconnect_passes_gateway_and_ends_request(fleet: Fleet) -> None:
    stream = fleet.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Go on"}],
        max_tokens=6000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    stream.close()

    def are_idle() -> bool:
        return not any(
            daemon.status()["requests"]["in_flight"] for daemon in fleet.daemons.values()
        )

    wait_until(are_idle, 5, fleet.log)


def padded_image_url(num_bytes: int) -> str:
    """The data URL of a small image, padded by an ignored chunk of `num_bytes`."""
    file = io.BytesIO()
    noise(7, (56, 56)).save(file, "PNG")
    png = file.getvalue()
    kind, data = b"prVt", bytes(num_bytes)
    chunk = len(data).to_bytes(4, "big") + kind + data
    chunk += zlib.crc32(kind + data).to_bytes(4, "big")
    head = 8 + 25  # signature, IHDR
    return "data:image/png;base64," + base64.b64encode(png[:head] + chunk + png[head:]).decode()


def test_body_of_60_megabytes_passes_gateway(fleet: Fleet) -> None:
    image = {"type": "image_url", "image_url": {"url": padded_image_url(15 * MIB)}}
    question = {"type": "text", "text": "What is this?"}
    answer = fleet.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [image, image, image, question]}],  # type: ignore[list-item]
        max_tokens=2,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens


def test_earlier_response_is_found_by_its_routing_key(fleet: Fleet) -> None:
    """Only one daemon stores it; the first turn's key leads there."""
    for i in range(6):
        headers = {"X-SMG-Routing-Key": f"a conversation of responses, {i}"}
        create = fleet.client().responses.with_raw_response.create
        first = create(model=MODEL, input="Hi", max_output_tokens=16, extra_headers=headers)
        second = create(
            model=MODEL,
            input="And?",
            previous_response_id=first.parse().id,
            max_output_tokens=16,
            extra_headers=headers,
        )
        assert first.headers[WORKER] == second.headers[WORKER]
        assert first.headers["x-vlm-routing-key"] == second.headers["x-vlm-routing-key"]
        assert second.parse().previous_response_id == first.parse().id


def test_earlier_response_is_unknown_on_another_worker(fleet: Fleet) -> None:
    key, other = (fleet.key_for(url) for url in fleet.daemons)
    responses = fleet.client().responses
    first = responses.create(
        model=MODEL, input="Hi", max_output_tokens=16, extra_headers={"X-SMG-Routing-Key": key}
    )
    with pytest.raises(openai.BadRequestError) as caught:
        responses.create(
            model=MODEL,
            input="And?",
            previous_response_id=first.id,
            extra_headers={"X-SMG-Routing-Key": other},
        )
    assert caught.value.code == "previous_response_not_found"


def test_stored_response_is_readable_through_gateway(
    nginx: Nginx, haproxy: HAProxy, gateway: Gateway
) -> None:
    """With its key; the gateway's own store would have none."""
    headers = {"X-SMG-Routing-Key": "a stored response"}
    for fleet in (nginx, haproxy, gateway):
        responses = fleet.client().responses
        response = responses.create(
            model=MODEL, input="Hi", max_output_tokens=16, extra_headers=headers
        )
        if fleet is gateway:
            with pytest.raises(openai.NotFoundError):
                responses.retrieve(response.id, extra_headers=headers)
        else:
            assert responses.retrieve(response.id, extra_headers=headers).id == response.id
