"""Malformed requests, and how each must be refused."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec

from tests.soak.request import Kind, Refusal, Request
from vlm_server.cli.bench.material import DESCRIBE, data_url, user

Fields = dict[str, Any]

_TOO_MANY = 65
"""Images; `limits.max_images` is 64."""

_TOO_MANY_WORDS = 300_000
"""More tokens than contexts hold."""


def _unknown_field(png: bytes) -> Fields:
    return {"messages": [user(DESCRIBE, data_url(png))], "colour": "blue"}


def _wrong_type(png: bytes) -> Fields:
    return {"messages": [user(DESCRIBE, data_url(png))], "temperature": "hot"}


def _no_messages(_: bytes) -> Fields:
    return {"messages": []}


def _other_model(_: bytes) -> Fields:
    return {"model": "none-such", "messages": [user("Hello")]}


def _broken_base64(png: bytes) -> Fields:
    return {"messages": [user(DESCRIBE, data_url(png)[:-40] + "*" * 40)]}


def _truncated_image(png: bytes) -> Fields:
    return {"messages": [user(DESCRIBE, data_url(png[: len(png) // 2]))]}


def _no_image(png: bytes) -> Fields:
    return {"messages": [user(DESCRIBE, data_url(png[len(png) // 2 :]))]}


def _too_many_images(png: bytes) -> Fields:
    return {"messages": [user(DESCRIBE, *[data_url(png)] * _TOO_MANY)]}


def _no_video(png: bytes) -> Fields:
    url = "data:video/mp4;base64," + base64.b64encode(png).decode()
    part = {"type": "video_url", "video_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}]}


def _too_long(_: bytes) -> Fields:
    return {"messages": [user("x " * _TOO_MANY_WORDS)]}


def _impossible_schema(_: bytes) -> Fields:
    schema = {"type": "object", "not": {"required": ["a"]}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": [user("Hello")], "response_format": wanted}


MALFORMED: dict[Callable[[bytes], Fields], Refusal] = {
    _unknown_field: Refusal(400, "unsupported_parameter"),
    _wrong_type: Refusal(400, "invalid_value"),
    _no_messages: Refusal(400, "invalid_value"),
    _other_model: Refusal(404, "model_not_found"),
    _broken_base64: Refusal(400, "invalid_image"),
    _truncated_image: Refusal(400, "invalid_image"),
    _no_image: Refusal(400, "invalid_image"),
    _too_many_images: Refusal(400, "invalid_value"),
    _no_video: Refusal(400, "invalid_video"),
    _too_long: Refusal(400, "context_length_exceeded"),
    _impossible_schema: Refusal(400, "invalid_value"),
}
"""From the function that makes a request's fields from an image to the expected refusal."""


def malformed(png: bytes) -> list[Request]:
    """One request of each kind, about `png`; the last one is not JSON."""
    requests = [_request(make, png) for make in MALFORMED]
    half = requests[0].body[: len(requests[0].body) // 2]
    return [*requests, Request(Kind.MALFORMED, half, refusal=Refusal(400, "invalid_value"))]


def refused_by_engine(png: bytes) -> Request:
    """A request that the front accepts and the engine refuses before it uses the device."""
    return _request(_truncated_image, png)


def _request(make: Callable[[bytes], Fields], png: bytes) -> Request:
    body = msgspec.json.encode({"model": "default"} | make(png))
    return Request(Kind.MALFORMED, body, refusal=MALFORMED[make])
