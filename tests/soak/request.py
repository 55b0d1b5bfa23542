"""One request and how it ended."""

from __future__ import annotations

import math
from enum import Enum

import msgspec


class Kind(Enum):
    """What a request asks; the value is its name in reports."""

    NEW_IMAGE = "new picture"
    SAME_AGAIN = "known picture, same question"
    OTHER_QUESTION = "known picture, new question"
    TWO_IMAGES = "two pictures"
    CONVERSATION = "turn of a conversation"
    SHORT_TEXT = "short text"
    LONG_TEXT = "long text"
    VIDEO = "video"
    CHOICES = "two choices"
    JSON = "JSON by schema"
    MALFORMED = "malformed"
    REFILL = "refill of the caches"
    """Not part of the mix: sent before memory is compared."""


class Ending(Enum):
    ANSWERED = "answered"
    REFUSED = "refused as expected"
    LEFT = "left by the client"
    FAILED = "failed"


class Patience(msgspec.Struct, frozen=True):
    """When the client closes the connection, whichever comes first.

    After `upload_share` of the body (1.0 is all of it: never), `seconds` after it began to send,
    or after that many `reads` of the answer's bytes.
    """

    upload_share: float = 1.0
    seconds: float = math.inf
    reads: float = math.inf


class Refusal(msgspec.Struct, frozen=True):
    """How a malformed request must be answered."""

    status: int
    code: str


class Request(msgspec.Struct, frozen=True):
    """`body` is for `POST /v1/chat/completions`; must be answered, or refused as `refusal` says."""

    kind: Kind
    body: bytes
    is_stream: bool = False
    patience: Patience = Patience()
    refusal: Refusal | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is None if no response came. `ttft` is in seconds, for answered streams."""

    kind: Kind
    ending: Ending
    status: int | None = None
    ttft: float | None = None
    text: str = ""
    error: str | None = None
