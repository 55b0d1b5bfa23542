"""The key by which a gateway sends all turns of a conversation to one worker.

It is sent from the first turn on: a gateway that has no key yet would choose by chance, and the
key in the answer might lead elsewhere. Of a picture in a data URL it is the one that the daemon
would make itself (`api.parsing.routing_key`), so that other clients who ask about it find it
cached.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

HEADER = "X-SMG-Routing-Key"


def of_messages(messages: Sequence[dict[str, Any]]) -> str:
    """The key of a conversation: the SHA-256 of its first picture or video, if there was one before
    the first answer; else of what was said until then. In hex."""
    opening = list(takewhile(lambda message: message["role"] != "assistant", messages))
    url = next(_urls(opening), None)
    said = json.dumps(opening).encode() if url is None else _bytes_at(url)
    return hashlib.sha256(said).hexdigest()


def _urls(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Those of pictures, then those of videos."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    for kind in ("image_url", "video_url"):
        yield from (part[kind]["url"] for part in parts if part["type"] == kind)


def _bytes_at(url: str) -> bytes:
    """What is in a data URL; of another one the URL itself, since nobody reads it here."""
    head, _, content = url.partition(";base64,")
    return base64.b64decode(content) if head.startswith("data:") else url.encode()
