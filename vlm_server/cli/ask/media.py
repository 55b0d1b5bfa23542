"""Images, videos, documents and the question of `ask`, checked before a daemon is started."""

from __future__ import annotations

import base64
import io
import mimetypes
import shlex
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_server.api.parsing.media import documents, image_header, video_header
from vlm_server.api.parsing.media.external import MediaUrl
from vlm_server.api.parsing.media.formats import MP4, guess_format
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.errors import ConfigError, InvalidRequest
from vlm_server.settings import Limits

STDIN = "-"
_PDF = "application/pdf"
_MEDIA = ("image/", "video/", "application/pdf")
_KINDS = {
    **{name: f"image/{name.lower()}" for name in image_header.READABLE},
    "HEIC": "image/heic",
    "PDF": _PDF,
    **dict.fromkeys(("WebM", "Matroska", "EBML"), "video/webm"),
}
"""MIME types by the formats that files begin like; videos in MP4's container have several."""
_UNKNOWN = "application/octet-stream"
_TEXT_BYTES = 4096
"""By which text is recognized."""


def split(words: Sequence[str]) -> tuple[Sequence[str], str | None]:
    """Files, and the question: the last word unless it is a file, named like one, or a URL.

    Raises ConfigError if two words are `-`, standard input.
    """
    if words.count(STDIN) > 1:
        raise ConfigError("standard input (-) can be one picture or the question, not both")
    if not words or list(words) == [STDIN]:
        return words, None
    if words[-1] != STDIN and (is_media_file(words[-1]) or _is_url(words[-1])):
        return words, None
    return words[:-1], words[-1]


def _is_url(word: str) -> bool:
    return word.startswith(("http://", "https://")) and not any(map(str.isspace, word))


def is_media_file(word: str) -> bool:
    """Whether `word` is a file, or the name of an image, video or PDF that could be one."""
    try:
        if Path(word).is_file():
            return True
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False
    return is_named_as_medium(word) and not any(character.isspace() for character in word)


def is_named_as_medium(name: str) -> bool:
    """Whether a file of this name is an image, a video or a PDF."""
    return (mimetypes.guess_type(name)[0] or "").startswith(_MEDIA)


@dataclass(frozen=True, slots=True)
class Medium:
    """An image, a video or a PDF: name, MIME type and bytes."""

    name: str
    kind: str
    data: bytes

    @property
    def is_video(self) -> bool:
        return self.kind.startswith("video/")

    @property
    def is_document(self) -> bool:
        return self.kind == _PDF

    @property
    def is_image(self) -> bool:
        return not (self.is_video or self.is_document)

    @property
    def noun(self) -> str:
        """What people call it."""
        return "video" if self.is_video else "document" if self.is_document else "picture"

    @property
    def url(self) -> str:
        """Data URL."""
        return f"data:{self.kind};base64,{base64.b64encode(self.data).decode()}"

    @property
    def part(self) -> dict[str, Any]:
        """The content part of a chat message."""
        if self.is_document:
            return {
                "type": "file",
                "file": {"filename": Path(self.name).name, "file_data": self.url},
            }
        kind = "video_url" if self.is_video else "image_url"
        return {"type": kind, kind: {"url": self.url}}


def read(word: str, limits: Limits, stdin: Callable[[], bytes] | None = None) -> Medium:
    """The medium in a file or stdin. Raises CommandFailed if the daemon would refuse it."""
    name = "standard input" if word == STDIN else word
    if _is_url(word):
        advice = f"download it first, such as by curl -LO {shlex.quote(word)}"
        raise CommandFailed(f"{word} is a URL, and ask takes files: {advice}")
    try:
        data = (stdin or _stdin)() if word == STDIN else Path(word).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandFailed(f"can't read {name}: {reason}") from None
    return checked(Medium(name, kind_of(word, data), data), limits)


def checked(medium: Medium, limits: Limits) -> Medium:
    """`medium`. Raises CommandFailed if the daemon would refuse it."""
    name, data = medium.name, medium.data
    if not data:
        raise CommandFailed(f"{name} is empty")
    try:
        if medium.is_document:
            source = MediaUrl("", name, "document", limits.max_document_bytes)
            documents.read_header(data, source, documents.PageOptions())
        elif medium.is_video:
            video_header.read(data, name)
        else:
            _check_kind(medium)
            image_header.read(data, name, limits.max_image_pixels)
    except InvalidRequest as error:
        raise CommandFailed(f"{name}: {error.message}") from None
    return medium


def _check_kind(medium: Medium) -> None:
    """Raises CommandFailed if `medium`, which is no video or PDF, is no picture either."""
    format_name = guess_format(medium.data)
    if format_name in (*image_header.READABLE, "HEIC"):
        return
    is_drawing = format_name == "SVG" or medium.kind.startswith("image/")
    if not is_drawing and _is_text(medium.data):
        kinds = "pictures, videos and PDFs: put its text into the question"
        raise CommandFailed(f"{medium.name} is text, and ask takes {kinds}")
    looks = f"looks like {format_name}" if format_name else "is of another kind"
    kinds = f"pictures ({', '.join(image_header.READABLE)}), videos and PDFs"
    raise CommandFailed(f"{medium.name} {looks}, and ask takes {kinds}: convert it first")


def _is_text(data: bytes) -> bool:
    try:
        text = getincrementaldecoder("utf-8-sig")().decode(data[:_TEXT_BYTES])
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character.isspace() for character in text)


def from_clipboard(limits: Limits) -> list[Medium]:
    """The picture in the clipboard, or the files. Raises CommandFailed."""
    from PIL import ImageGrab

    try:
        content = ImageGrab.grabclipboard()
    except NotImplementedError:
        raise CommandFailed("no clipboard here: it takes wl-clipboard or xclip") from None
    except (OSError, ValueError) as error:  # a helper that fails, or no picture
        raise CommandFailed(f"can't read the clipboard: {error}") from None
    if isinstance(content, list):
        return [read(name, limits) for name in content]
    if content is None:
        raise CommandFailed("the clipboard holds no picture")
    png = io.BytesIO()
    content.save(png, "PNG")
    return [checked(Medium("clipboard.png", "image/png", png.getvalue()), limits)]


def kind_of(name: str, data: bytes) -> str:
    """MIME type by the first bytes of `data`, else by `name`."""
    guess = mimetypes.guess_type(name)[0] or _UNKNOWN
    name_of_format = guess_format(data)
    if name_of_format == MP4:
        return guess if guess.startswith("video/") else "video/mp4"
    return _KINDS.get(name_of_format or "", guess)


def _stdin() -> bytes:
    if sys.stdin.isatty():
        raise CommandFailed("standard input is a terminal: pipe a picture into it")
    return sys.stdin.buffer.read()
