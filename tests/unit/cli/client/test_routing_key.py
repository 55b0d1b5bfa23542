"""Clients derive the same routing key as the daemon, and keep it during a conversation."""

from __future__ import annotations

import base64
import hashlib

from tests.unit.cli.scripted_server import ScriptedServer, listening
from vlm_server.cli.bench.material import assistant, user
from vlm_server.cli.bench.servers import BenchTarget, Client
from vlm_server.cli.client.chat import routing_key

IMAGE = b"not really one"
URL = f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"


def test_routing_key_of_image_is_its_sha256() -> None:
    messages = [user("What?", URL)]
    key = hashlib.sha256(IMAGE).hexdigest()
    assert routing_key(messages) == key
    assert routing_key([*messages, assistant("A circle."), user("And?")]) == key


def test_routing_key_of_text_covers_messages_before_first_answer() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Look.")]
    later = [*messages, assistant("Yes."), user("And this?", URL)]
    assert routing_key(messages) == routing_key(later)
    assert routing_key(messages) != routing_key([user("Look.")])


def test_routing_key_of_remote_image_depends_on_url() -> None:
    ours, other = (f"https://example.com/{name}.png" for name in "ab")
    keys = [routing_key([user("What?", url)]) for url in (ours, ours, other)]
    assert keys[0] == keys[1] != keys[2]


async def test_bench_sends_routing_key_header() -> None:
    server = ScriptedServer()
    async with (
        listening(server) as url,
        Client(BenchTarget("one", url, "scripted"), 10) as client,
    ):
        await client.ask([user("What?", URL)], 2)
        await client.ask([user("What?")], 2, "kept")
    assert server.keys == [hashlib.sha256(IMAGE).hexdigest(), "kept"]
