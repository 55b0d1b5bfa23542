"""What the readers of all dialects get, and what they make of a body."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vlm_server.protocol import Submit
from vlm_server.settings import Limits
from vlm_server.supervisor.client import EngineRequest, engine_request

Body = bytes | bytearray


class Context(msgspec.Struct, frozen=True):
    """What is known of a request besides its body. `model` is the name it is served under."""

    model: str
    request_id: str
    cache_salt: str
    limits: Limits


class Call(msgspec.Struct, frozen=True, tag=True):
    """A request for the engine, and what the front needs to answer it."""

    request: EngineRequest
    stream: bool
    include_usage: bool
    num_images: int
    num_videos: int
    num_choices: int


Read = Callable[[Body, Context], Call]
"""Raises RequestError."""
ReadText = Callable[[Body, Context], Call | None]
"""The same for a request without media; None for one that has some. Looks at no media."""


def call_of(submit: Submit, *, stream: bool, include_usage: bool) -> Call:
    """The call that asks the engine for `submit`."""
    return Call(
        request=engine_request(submit),
        stream=stream,
        include_usage=include_usage,
        num_images=len(submit.images),
        num_videos=len(submit.videos),
        num_choices=submit.sampling.n,
    )
