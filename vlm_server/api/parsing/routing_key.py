"""Which conversation a request belongs to, so that a gateway can send all its turns to one worker.

A client that knows says so: `X-SMG-Routing-Key` is the header of the Shepherd Model Gateway, which
hashes it. For all others the key is made of what stays the same from turn to turn: what was said
before the first answer. Answers tell it in `X-VLM-Routing-Key`. Docs: docs/scale.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import takewhile

import msgspec

from vlm_server.protocol import Image, ImagePart, Message, Submit, Video, VideoPart

SENT = "X-SMG-Routing-Key"
TOLD = "X-VLM-Routing-Key"
MAX_CHARS = 128
"""The gateway ignores longer keys."""
_PROMPT_LENGTH = 256
"""How much of a prompt without messages counts, in characters or tokens: more may be added."""

_encode = msgspec.msgpack.Encoder().encode


def sent(headers: Mapping[str, str]) -> str:
    """The key that a client sent; empty if there is none that a gateway heeds."""
    key = headers.get(SENT.lower(), "")
    is_heeded = len(key) <= MAX_CHARS and key.isascii() and key.isprintable()
    return key if is_heeded else ""


def of_name(name: str) -> str:
    """The key of a conversation that its client has a name for, whatever is in that."""
    return hashlib.sha256(name.encode(errors="replace")).hexdigest()


def of(submit: Submit) -> str:
    """The key of the conversation whose latest turn is `submit`, in hex; empty if there is none.

    It is the SHA-256 of the first picture, else of the first video, that came before the first
    answer; if there was none, of the texts until then.
    """
    if submit.prompt is not None:
        return hashlib.sha256(_encode(submit.prompt[:_PROMPT_LENGTH])).hexdigest()
    said = takewhile(lambda message: message.role != "assistant", submit.messages)
    opening = tuple(msgspec.structs.replace(message, param="") for message in said)
    media = _media(submit, opening)
    return (
        media[0].content_hash
        if media
        else hashlib.sha256(_encode(opening)).hexdigest()
        if opening
        else ""
    )


def _media(submit: Submit, messages: tuple[Message, ...]) -> list[Image | Video]:
    """Pictures, then videos."""
    parts = [part for message in messages for part in message.content]
    pictures = [submit.images[part.index] for part in parts if isinstance(part, ImagePart)]
    videos = [submit.videos[part.index] for part in parts if isinstance(part, VideoPart)]
    return [*pictures, *videos]
