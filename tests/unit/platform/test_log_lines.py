"""Log lines of both formats, as a handler writes them."""

from __future__ import annotations

import io
import json
import logging

import pytest

from vlm_server.platform import log_lines
from vlm_server.platform.log_lines import log_fields


def written(style: str) -> tuple[logging.Logger, io.StringIO]:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(log_lines.formatter(style, "front"))
    logger = logging.Logger("vlm_server.test")
    logger.addHandler(handler)
    return logger, out


FIELDS = {"method": "POST", "route": "/v1/x", "id": "ab", "status": 200, "error": None}


def test_text_log_line_contains_fields() -> None:
    logger, out = written("text")
    log_fields(logger, logging.INFO, FIELDS)
    assert out.getvalue().endswith(" front INFO POST /v1/x id=ab status=200 error=-\n")


def test_json_log_line_contains_fields() -> None:
    logger, out = written("json")
    log_fields(logger, logging.INFO, FIELDS)
    line = json.loads(out.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "process": "front",
        "level": "info",
        "logger": "vlm_server.test",
        "message": "request",
        **FIELDS,
    }


@pytest.mark.parametrize("text", ["two\nlines", 'a "quote"', "\ud800 half a pair", "\x1b[31mred"])
def test_any_message_is_single_line_of_json(text: str) -> None:
    logger, out = written("json")
    logger.warning("it was %s", text)
    (line,) = out.getvalue().splitlines()
    message = json.loads(line)["message"]
    assert message == f"it was {text}".encode("utf-8", "backslashreplace").decode()


def test_traceback_is_part_of_json_line() -> None:
    logger, out = written("json")
    try:
        raise ValueError("swordfish")
    except ValueError:
        logger.exception("it failed")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: swordfish" in json.loads(line)["exception"]
