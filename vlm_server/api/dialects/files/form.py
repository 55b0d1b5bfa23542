"""The form of an upload (`multipart/form-data`), parsed as it arrives; its file goes to disk.

Boundaries are found by a regular expression: a parser that looks at every byte in Python takes
thirty times as long for hostile forms, and the event loop waits for the interpreter meanwhile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from python_multipart.multipart import parse_options_header

from vlm_server.api.files.upload import Upload
from vlm_server.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType

MAX_PARTS = 16
MAX_FIELD_BYTES = 4096
OVERHEAD_BYTES = 128 << 10
"""The most bytes of a form besides its file."""
MAX_NAME_CHARS = 255
_MAX_HEAD_BYTES = 8192
_MAX_BOUNDARY_BYTES = 256
_MAX_PADDING_BYTES = 64
"""White space after a boundary."""
_FORM_TYPE = b"multipart/form-data"
_FILE = "file"
_PATH = re.compile(r".*[/\\]", re.DOTALL)
_DISPOSITION = re.compile(rb"^content-disposition[ \t]*:(.*?)\r?$", re.IGNORECASE | re.MULTILINE)
_UNREADABLE = "The body is not a readable form (multipart/form-data)."


@dataclass(slots=True)
class _Part:
    """A part whose head is complete; `name` is that of its field."""

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
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
            raise InvalidRequest(
                f"The Content-Type has no boundary of 1 to {_MAX_BOUNDARY_BYTES} bytes."
            )
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._upload = upload
        self._part: _Part | None = None
        """The part whose content is being read; None in a head, or before the first."""
        self._num_parts = 0
        self._is_complete = False
        mark = rb"\r\n--" + re.escape(boundary)
        self._boundary = re.compile(rb"%b(--|[ \t]{0,%d}\r\n)" % (mark, _MAX_PADDING_BYTES))
        self._held_bytes = len(boundary) + _MAX_PADDING_BYTES + 6
        """A boundary has fewer: the end of a piece that may be the beginning of one."""
        self._buffer = bytearray(b"\r\n")

    def write(self, data: bytes) -> None:
        """Parse the next bytes. Raises InvalidRequest, PayloadTooLarge and StorageFull."""
        self._buffer += data
        while not self._is_complete and self._advance():
            pass
        if self._is_complete:
            self._buffer.clear()  # what follows the last boundary means nothing

    def finish(self) -> None:
        """Raises InvalidRequest unless the form is complete and has a file."""
        if not self._is_complete:
            raise InvalidRequest("The form is cut off: its last boundary is missing.")
        if self.filename is None:
            raise InvalidRequest("The form has no `file`.", _FILE)

    def _advance(self) -> bool:
        """Read a head, or content up to a boundary; False if more bytes are needed for that."""
        if self._num_parts and self._part is None:
            return self._read_head()
        match = self._boundary.search(self._buffer)
        end = max(0, len(self._buffer) - self._held_bytes) if match is None else match.start()
        self._add_content(bytes(self._buffer[:end]))
        if match is None:
            del self._buffer[:end]
            return False
        self._end_part()
        self._is_complete, after = match[1] == b"--", match.end()
        del match, self._buffer[:after]
        if not self._is_complete:
            self._num_parts += 1
            if self._num_parts > MAX_PARTS:
                raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.")
        return True

    def _read_head(self) -> bool:
        """Read the headers of a part."""
        end = self._buffer.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
        if end < 0:
            if len(self._buffer) >= _MAX_HEAD_BYTES:
                raise InvalidRequest(_UNREADABLE)
            return False
        disposition = _DISPOSITION.search(self._buffer, 0, end)
        self._part = self._named_part(disposition[1] if disposition else b"")
        del self._buffer[: end + 4]
        return True

    def _named_part(self, disposition: bytes) -> _Part:
        """The part with this Content-Disposition. Raises InvalidRequest."""
        _, options = parse_options_header(disposition)
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise InvalidRequest("A part of the form has no name.")
        part = _Part(name.decode("utf-8", "replace"), filename is not None or name == b"file")
        if part.is_file:
            if part.name != _FILE or self.filename is not None:
                raise InvalidRequest("The form must have one file, its field `file`.", _FILE)
            self.filename = _safe_name((filename or b"").decode("utf-8", "replace"))
        return part

    def _add_content(self, data: bytes) -> None:
        """Take the next bytes of the current part; before the first, there are but line ends."""
        if self._part is None:
            if data.strip(b"\r\n"):
                raise InvalidRequest(_UNREADABLE)
        elif self._part.is_file:
            self._upload.write(data)
        else:
            self._part.value += data
            if len(self._part.value) > MAX_FIELD_BYTES:
                raise PayloadTooLarge(f"A field of the form has more than {MAX_FIELD_BYTES} bytes.")

    def _end_part(self) -> None:
        if self._part is not None and not self._part.is_file:
            self.fields[self._part.name] = self._part.value.decode("utf-8", "replace")
        self._part = None


def _safe_name(filename: str) -> str:
    """The last part of a path, without control characters; it is shown, and never opened."""
    name = "".join(filter(str.isprintable, _PATH.sub("", filename)))
    return name[:MAX_NAME_CHARS] or "upload"
