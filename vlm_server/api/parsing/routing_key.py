"""The routing key of a conversation, by which a gateway sends all its turns to one worker.

Clients may send it as `X-SMG-Routing-Key`, the header of the Shepherd Model Gateway, which hashes
it. Otherwise it is a hash of the messages before the first answer, the same in all turns. Answers
have it in `X-VLM-Routing-Key`. Docs: docs/scale.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import takewhile

import msgspec

from vlm_server.protocol import ImagePart, Submit, VideoPart

REQUEST_HEADER = "X-SMG-Routing-Key"
RESPONSE_HEADER = "X-VLM-Routing-Key"
MAX_CHARS = 128
"""The longest key that the gateway uses."""
_PROMPT_LENGTH = 256
"""The length of the hashed part of a prompt without messages, in characters or tokens."""

_encode = msgspec.msgpack.Encoder().encode


def of_headers(headers: Mapping[str, str]) -> str:
    """The key that a client sent; empty if there is none, or one that the gateway ignores."""
    key = headers.get(REQUEST_HEADER.lower(), "")
    is_heeded = len(key) <= MAX_CHARS and key.isascii() and key.isprintable()
    return key if is_heeded else ""


def of_name(name: str) -> str:
    """The key of a conversation named by its client."""
    return hashlib.sha256(name.encode(errors="replace")).hexdigest()


def of_submit(submit: Submit) -> str:
    """The key of the conversation whose latest turn is `submit`, in hex; empty if there is none.

    The SHA-256 of the opening's first image, else its first video, else its texts.
    """
    if submit.prompt is not None:
        return hashlib.sha256(_encode(submit.prompt[:_PROMPT_LENGTH])).hexdigest()
    messages = takewhile(lambda message: message.role != "assistant", submit.messages)
    opening = tuple(msgspec.structs.replace(message, param="") for message in messages)
    parts = [part for message in opening for part in message.content]
    images = [submit.images[part.index] for part in parts if isinstance(part, ImagePart)]
    videos = [submit.videos[part.index] for part in parts if isinstance(part, VideoPart)]
    if images or videos:
        return images[0].content_hash if images else videos[0].content_hash
    return hashlib.sha256(_encode(opening)).hexdigest() if opening else ""
