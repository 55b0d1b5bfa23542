"""The lines of a batch's file: checked first, then read one by one."""

from __future__ import annotations

import re
import threading
from array import array
from typing import BinaryIO

import msgspec

from vlm_server.settings import BatchSettings

MAX_ID_CHARS = 512
_MAX_FAULTS = 20
_CHUNK_LINES, _CHUNK_BYTES = 200, 1 << 20
_ILLEGAL = re.compile(r"[\x00-\x1f\ud800-\udfff]")


class Line(msgspec.Struct, frozen=True):
    """A request: `body` is its JSON, as it stands."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Options(msgspec.Struct):
    stream: object = None
    background: object = None


class Fault(msgspec.Struct, frozen=True):
    """An error in the file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineFile:
    """The places of the lines of `file`, which is open until `close`. Call it from threads."""

    def __init__(self, file: BinaryIO, endpoint: str, settings: BatchSettings) -> None:
        self.faults: list[Fault] = []
        self._file = file
        self._lock = threading.Lock()
        self._endpoint = endpoint
        self._settings = settings
        self._offsets = array("Q")
        self._ids = set[str]()
        self._number = 0
        self._offset = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> Line:
        """The line `index` of those that are not empty."""
        with self._lock:
            self._file.seek(self._offsets[index])
            data = self._file.readline()
        return msgspec.json.decode(data, type=Line)

    def check_some(self) -> bool:
        """Check the next lines, some ms of work, and return whether there are more."""
        end = self._offset + _CHUNK_BYTES
        for _ in range(_CHUNK_LINES):
            if self._offset >= end:
                return True
            self._file.seek(self._offset)
            data = self._file.readline(self._settings.max_line_bytes + 1)
            if not data:
                if not self._offsets and not self.faults:
                    self._fault("empty_file", "The file has no requests.")
                self._ids.clear()
                return False
            self._number += 1
            if len(data) > self._settings.max_line_bytes:
                limit = f"{self._settings.max_line_bytes} bytes (batches.max_line_bytes)"
                self._fault("line_too_large", f"The line is larger than {limit}.")
                return False
            if data.strip():
                self._check(data)
                self._offsets.append(self._offset)
            self._offset += len(data)
            if len(self._offsets) > self._settings.max_lines:
                limit = f"{self._settings.max_lines} requests (batches.max_lines)"
                self._fault("too_many_tasks", f"The file has more than {limit}.")
                return False
            if len(self.faults) >= _MAX_FAULTS:
                return False
        return True

    def _check(self, data: bytes) -> None:
        try:
            line = msgspec.json.decode(data, type=Line)
            options = msgspec.json.decode(line.body, type=_Options)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            is_json = isinstance(error, msgspec.ValidationError)
            text = str(error)[:200] if is_json else "This line is not parseable as valid JSON."
            self._fault("invalid_request" if is_json else "invalid_json_line", text)
            return
        if not line.custom_id or len(line.custom_id) > MAX_ID_CHARS:
            text = f"`custom_id` must have from 1 to {MAX_ID_CHARS} characters."
            self._fault("invalid_custom_id", text, "custom_id")
        elif _ILLEGAL.search(line.custom_id):
            self._fault("invalid_custom_id", "`custom_id` has a control character.", "custom_id")
        elif line.custom_id in self._ids:
            text = "The custom_id for this request is a duplicate of another request."
            self._fault("duplicate_custom_id", text, "custom_id")
        self._ids.add(line.custom_id)
        if line.method != "POST":
            self._fault("invalid_method", "The HTTP method must be POST.", "method")
        if line.url != self._endpoint:
            text = "The URL provided for this request does not match the batch endpoint."
            self._fault("invalid_url", text, "url")
        for name in ("stream", "background"):
            if getattr(options, name) not in (None, False):
                text = f"`{name}` is not supported in a batch."
                self._fault("invalid_request", text, f"body.{name}")

    def _fault(self, code: str, message: str, param: str | None = None) -> None:
        number = self._number if code != "empty_file" else None
        self.faults.append(Fault(code, message, number, param))

    def close(self) -> None:
        self._file.close()
