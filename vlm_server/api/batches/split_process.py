"""The process that makes the file of a batch from a body with all its requests (Anthropic's form).

Arguments: bytes of address space, CPU seconds of a body, most requests, most bytes of one. A job is
the body, its answer the file's lines or an error.
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from vlm_server.api.batches.lines import Line
from vlm_server.api.outcomes import serve_outcomes
from vlm_server.errors import InvalidRequest, PayloadTooLarge, UnsupportedField
from vlm_server.platform.child.serve import ChildLimits

ENDPOINT = "/v1/messages"
_RETIRE_BYTES = 256 << 20


class _Request(Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


class BatchBody(Struct, forbid_unknown_fields=True):
    """Anthropic's request for a batch."""

    requests: Annotated[list[_Request], Meta(min_length=1)]


class _Options(Struct):
    stream: object = None


class SplitLines(Struct, frozen=True, tag=True):
    """The lines of a batch's file, and their number."""

    data: bytes
    number: int


def split(body: bytes, max_lines: int, max_line_bytes: int) -> SplitLines:
    """The lines for the requests in `body`. Raises RequestError."""
    try:
        requests = msgspec.json.decode(body, type=BatchBody).requests
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        param = path.strip("`.")[:100]
        raise InvalidRequest(f"`{param or 'requests'}`: {text[:200]}.", param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("The request's body is not valid JSON.") from None
    if len(requests) > max_lines:
        raise InvalidRequest(
            f"A batch has at most {max_lines} requests (batches.max_lines).", "requests"
        )
    lines, ids = list[bytes](), set[str]()
    for index, request in enumerate(requests):
        if request.custom_id in ids:
            raise InvalidRequest("`custom_id` must be unique.", f"requests[{index}].custom_id")
        ids.add(request.custom_id)
        lines.append(_line(request, f"requests[{index}].params", max_line_bytes))
    return SplitLines(b"".join(lines), len(lines))


def _line(request: _Request, param: str, max_bytes: int) -> bytes:
    try:
        options = msgspec.json.decode(request.params, type=_Options)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest(f"`{param}` must be an object.", param) from None
    if options.stream not in (None, False):
        raise UnsupportedField("`stream` is not supported in a batch.", f"{param}.stream")
    body = bytes(request.params).replace(b"\r", b" ").replace(b"\n", b" ")  # between its values
    line = Line(request.custom_id, "POST", ENDPOINT, msgspec.Raw(body))
    data = msgspec.json.encode(line) + b"\n"
    if len(data) > max_bytes:
        limit = f"{max_bytes} bytes (batches.max_line_bytes)"
        raise PayloadTooLarge(f"`{param}` is larger than {limit}.", param)
    return data


def main(memory_bytes: str, job_seconds: str, max_lines: str, max_line_bytes: str) -> None:
    serve_outcomes(
        lambda job: split(bytes(job), int(max_lines), int(max_line_bytes)),
        ChildLimits(int(memory_bytes), float(job_seconds), _RETIRE_BYTES),
        InvalidRequest("The request can't be read: it takes too much memory."),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
