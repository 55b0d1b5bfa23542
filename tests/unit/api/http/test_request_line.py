"""Log lines of requests, as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_server.api.http.access_log import Entry, duration, summary
from vlm_server.errors import EngineDied, InvalidRequest, ModelNotFound

FIELDS = Entry().fields("POST", "/v1/chat/completions") | {"status": 200, "ms": 740}
ANSWERED = {"model": "demo", "finish": "stop", "prompt_tokens": 182, "tokens": 7}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {**ANSWERED, "cached_tokens": 181, "images": 1},
            "demo  182 → 7 tokens (181 cached)  1 picture  0.74 s",
        ),
        (
            {**ANSWERED, "finish": "length", "images": 2, "videos": 1, "key": "laptop"},
            "demo  182 → 7 tokens (cut off)  2 pictures, 1 video  0.74 s  key laptop",
        ),
        ({"model": "demo", "prompt_tokens": 9}, "demo  9 tokens  0.74 s"),
        ({"model": "demo", "finish": "abort"}, "demo  the client left  0.74 s"),
        ({"status": 499}, "POST /v1/chat/completions  the client left  0.74 s"),
        ({}, "POST /v1/chat/completions  0.74 s"),
    ],
)
def test_request_line_is_short_and_names_counts(fields: dict[str, Any], line: str) -> None:
    assert summary({**FIELDS, **fields}) == line


def test_request_line_has_error_but_no_text_of_client() -> None:
    entry = Entry()
    entry.fail(InvalidRequest("It is not `swordfish`.", "tools[0].s w"))
    fields = entry.fields("POST", "/x") | {"ms": 3, "status": 400}
    assert summary(fields) == "POST /x  failed: invalid value in tools[0].s?w (400)  3 ms"
    entry.fail(ModelNotFound("There is no `swordfish`.", "model"))
    fields = entry.fields("POST", "/x") | {"ms": 3, "status": 404}
    assert summary(fields) == "POST /x  failed: model not found (404)  3 ms"


def test_failure_within_stream_is_not_called_success() -> None:
    entry = Entry(status=200, model="demo")
    entry.fail(EngineDied("It died."))
    line = summary(entry.fields("POST", "/x") | {"ms": 9_000})
    assert line == "demo  failed: engine died  9.00 s"


def test_durations_have_units_of_their_size() -> None:
    times = {3: "3 ms", 740: "0.74 s", 9_990: "9.99 s", 9_999: "10.0 s", 59_900: "59.9 s"}
    times |= {60_000: "1 min 0 s", 125_400: "2 min 5 s"}
    assert {ms: duration(ms) for ms in times} == times
