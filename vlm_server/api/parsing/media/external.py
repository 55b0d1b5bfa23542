"""Media whose bytes are not in the request: URLs, and names of uploaded files.

Request parsing uses neither network nor disk: it raises BytesNeeded. The front then reads the
uploaded files, and sends a `UrlJob` to a process that reads URLs; the request is parsed again with
the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from vlm_server.errors import (
    FileNotStored,
    InvalidDocument,
    InvalidImage,
    InvalidRequest,
    InvalidVideo,
    PayloadTooLarge,
    RequestError,
)

HASH_PREFIX = "sha256:"
"""Begins the name that any client can compute: the SHA-256 of a file's bytes, in hex digits."""
_FILE_NAME = re.compile(r"file-[0-9a-f]{24}|sha256:[0-9a-f]{64}")
_ERRORS: dict[str, type[InvalidRequest]] = {
    "image": InvalidImage,
    "video": InvalidVideo,
    "document": InvalidDocument,
}


class MediaUrl(Struct, frozen=True):
    """The URL of an image, video or document, or the name of an uploaded one.

    `param` names the first content part that has it.
    """

    url: str
    param: str
    kind: Literal["image", "video", "document"]
    max_bytes: int

    @property
    def is_file(self) -> bool:
        return self.url[:5].lower() == "file:"

    @property
    def is_uploaded(self) -> bool:
        """Whether it is the name of an uploaded file."""
        return is_file_name(self.url)

    def invalid(self, message: str) -> RequestError:
        """The error of its kind, such as InvalidImage, with `message`."""
        return _ERRORS[self.kind](message, self.param)

    def refusal(self, why: str) -> RequestError:
        """An error with a sentence about the image, video or document that ends with `why`."""
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


class BytesNeeded(Exception):
    """The bytes of `urls` are needed to parse a request. Not an error of the client."""

    def __init__(self, urls: Sequence[MediaUrl]) -> None:
        super().__init__(f"{len(urls)} URLs")
        self.urls = tuple(urls)


def is_external(url: str) -> bool:
    """Whether `url` refers to bytes elsewhere: by `https:` or `file:`, or as an uploaded file."""
    is_url = url[:6].lower() == "https:" or url[:5].lower() == "file:"
    return is_url or is_file_name(url)


def is_file_name(text: str) -> bool:
    """Whether `text` has the form of the id of an uploaded file, or of the hash of its bytes."""
    return _FILE_NAME.fullmatch(text) is not None


def file_name(file_id: str, param: str) -> str:
    """`file_id`, from a field for ids. Raises FileNotStored if no file can have it."""
    if is_file_name(file_id):
        return file_id
    raise not_stored(param)


def not_stored(param: str) -> FileNotStored:
    """The error about the uploaded file that the part `param` names."""
    return FileNotStored(
        f"The file that `{param}` names is not stored here: it was not uploaded with this API key, "
        "or deleted, or dropped since (`files.keep_seconds` and `files.max_bytes`). Send its "
        "bytes, or upload it again.",
        param,
    )
