"""The form of an upload (`multipart/form-data`), parsed as it arrives; its file goes to disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vlm_server.api.files.upload import Upload
from vlm_server.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 16
MAX_FIELD_BYTES = 4096
OVERHEAD_BYTES = 128 << 10
"""The most bytes of a form besides its file."""
MAX_NAME_CHARS = 255
_FORM_TYPE = b"multipart/form-data"
_FILE = "file"
_PATH = re.compile(r".*[/\\]", re.DOTALL)


@dataclass(slots=True)
class _Part:
    """A part whose headers are complete; `name` is that of its field."""

    name: str
    is_file: bool
    value: bytearray = field(default_factory=bytearray)


class UploadForm:
    """Parses a form with one file, the field `file`. Call it from one thread at a time.

    Raises UnsupportedMediaType if `content_type` is not a form's.
    """

    def __init__(self, content_type: str, upload: Upload) -> None:
        media_type, options = parse_options_header(content_type)
        if media_type != _FORM_TYPE:
            raise UnsupportedMediaType("The Content-Type must be multipart/form-data.")
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._upload = upload
        self._part: _Part | None = None
        self._num_parts = 0
        self._is_complete = False
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        boundary = options.get(b"boundary")
        if not boundary:
            raise InvalidRequest("The Content-Type has no boundary.")
        with _form_errors():
            self._parser = MultipartParser(boundary, self._callbacks())

    def write(self, data: bytes) -> None:
        """Parse the next bytes. Raises InvalidRequest, PayloadTooLarge and StorageFull."""
        with _form_errors():
            self._parser.write(data)

    def finish(self) -> None:
        """Raises InvalidRequest unless the form is complete and has a file."""
        if not self._is_complete:
            raise InvalidRequest("The form is cut off: its last boundary is missing.")
        if self.filename is None:
            raise InvalidRequest("The form has no `file`.", _FILE)

    # ---- what the parser calls -----------------------------------------------------------

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.")
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _on_header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = (bytearray(), bytearray())

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise InvalidRequest("A part of the form has no name.")
        self._part = _Part(name.decode("utf-8", "replace"), filename is not None or name == b"file")
        if not self._part.is_file:
            return
        if self._part.name != _FILE or self.filename is not None:
            raise InvalidRequest("The form must have one file, its field `file`.", _FILE)
        self.filename = _safe_name((filename or b"").decode("utf-8", "replace"))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        assert self._part is not None
        if self._part.is_file:
            self._upload.write(data[start:end])
            return
        self._part.value += data[start:end]
        if len(self._part.value) > MAX_FIELD_BYTES:
            raise PayloadTooLarge(f"A field of the form has more than {MAX_FIELD_BYTES} bytes.")

    def _on_part_end(self) -> None:
        assert self._part is not None
        if not self._part.is_file:
            self.fields[self._part.name] = self._part.value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._is_complete = True


@contextmanager
def _form_errors() -> Iterator[None]:
    try:
        yield
    except FormParserError:
        raise InvalidRequest("The body is not a readable form (multipart/form-data).") from None


def _safe_name(filename: str) -> str:
    """The last part of a path, without control characters; it is shown, and never opened."""
    name = "".join(filter(str.isprintable, _PATH.sub("", filename)))
    return name[:MAX_NAME_CHARS] or "upload"
