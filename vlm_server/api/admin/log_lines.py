"""`GET /v1/log`: the last lines of the log, for operators."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vlm_server.errors import InvalidRequest
from vlm_server.platform.log_tail import LogTail

_MAX_DIGITS = 15


class LogLines:
    """The endpoint. A client follows the log by asking for the lines `after` the last it has."""

    def __init__(self, tail: LogTail) -> None:
        self._tail = tail

    async def show(self, request: Request) -> Response:
        """The kept lines, or those after the number in the query."""
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) <= _MAX_DIGITS):
            raise InvalidRequest("`after` must be the number of a line.", "after")
        lines = msgspec.to_builtins(self._tail.after(int(after)))
        return JSONResponse({"lines": lines, "last": self._tail.num_lines})
