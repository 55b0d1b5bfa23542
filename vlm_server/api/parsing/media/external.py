"""URLs of images and videos whose bytes are not in the request.

Request parsing uses neither network nor disk: it raises BytesNeeded. The front then sends a
`UrlJob` to a process that reads URLs, and the request is parsed again with the `Contents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from vlm_server.errors import InvalidImage, InvalidVideo, PayloadTooLarge, RequestError


class MediaUrl(Struct, frozen=True):
    """The URL of an image or video; `param` names the first content part that has it."""

    url: str
    param: str
    kind: Literal["image", "video"]
    max_bytes: int

    @property
    def is_file(self) -> bool:
        return self.url[:5].lower() == "file:"

    def invalid(self, message: str) -> RequestError:
        """An InvalidImage or InvalidVideo with `message`."""
        error = InvalidImage if self.kind == "image" else InvalidVideo
        return error(message, self.param)

    def refusal(self, why: str) -> RequestError:
        """An error with a sentence about the image or video that ends with `why`."""
        return self.invalid(f"The {self.kind} {why}.")

    def too_large(self) -> PayloadTooLarge:
        message = (
            f"The {self.kind} is larger than {self.max_bytes} bytes (limits.max_{self.kind}_bytes)."
        )
        return PayloadTooLarge(message, self.param)


class UrlJob(Struct, frozen=True):
    """URLs to read within `seconds`, of at most `max_total_bytes` in total."""

    urls: tuple[MediaUrl, ...]
    hosts: tuple[str, ...]
    roots: tuple[str, ...]
    seconds: float
    max_total_bytes: int


class Contents(Struct, frozen=True, tag=True):
    """The bytes of the URLs of a job, in their order."""

    data: tuple[bytes, ...]


class SentError(Struct, frozen=True, tag=True):
    """A RequestError on its way between processes: see `errors.RequestError.from_code`."""

    code: str
    message: str
    param: str | None


class BytesNeeded(Exception):
    """The bytes of `urls` are needed to parse a request. Not an error of the client."""

    def __init__(self, urls: Sequence[MediaUrl]) -> None:
        super().__init__(f"{len(urls)} URLs")
        self.urls = tuple(urls)


def is_external(url: str) -> bool:
    """Whether `url` refers to bytes elsewhere: by `https:` or `file:`."""
    return url[:6].lower() == "https:" or url[:5].lower() == "file:"
