"""Log lines of both formats, as a handler writes them."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from vlm_server.platform import log_lines
from vlm_server.platform.log_lines import log_fields


def written(style: str, out: io.StringIO | None = None) -> tuple[logging.Logger, io.StringIO]:
    out = out or io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(log_lines.formatter(style, "front", out))
    logger = logging.Logger("vlm_server.test")
    logger.addHandler(handler)
    return logger, out


SHORT = "x  3 ms"
FIELDS = {"method": "POST", "route": "/v1/x", "id": "ab", "status": 200, "error": None}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_terminal(style: str) -> tuple[logging.Logger, io.StringIO]:
    return written(style, Terminal())


def test_text_log_line_is_summary() -> None:
    logger, out = written("text")
    log_fields(logger, logging.INFO, FIELDS, SHORT)
    assert out.getvalue().endswith(f" front INFO {SHORT}\n")


def test_terminal_log_line_has_time_of_day_and_marks_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    logger, out = at_terminal("text")
    log_fields(logger, logging.INFO, FIELDS, SHORT)
    logger.warning("it is late")
    first, second = out.getvalue().removeprefix("\r\x1b[K").split("\n\r\x1b[K")
    assert re.fullmatch(rf"\d\d:\d\d:\d\d  {SHORT}", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  warning: it is late\n", second)


def test_terminal_log_wraps_lines_below_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    logger, out = at_terminal("text")
    logger.warning("the hub can't be reached, and is asked again in a minute")
    first, *others = out.getvalue().removeprefix("\r\x1b[K").splitlines()
    assert first[10:] == "warning: the hub can't be"
    assert others == [" " * 10 + "reached, and is asked again in", " " * 10 + "a minute"]


def test_terminal_log_colours_failed_requests_and_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    logger, out = at_terminal("text")
    for status, error in ((200, None), (404, "not_found"), (502, "engine_died")):
        log_fields(logger, logging.INFO, FIELDS | {"status": status, "error": error}, SHORT)
    logger.error("it broke")
    well, theirs, ours, broken = out.getvalue().strip("\n").split("\n")
    assert SHORT in well
    assert f"\x1b[33m{SHORT}\x1b[0m" in theirs
    assert f"\x1b[31m{SHORT}\x1b[0m" in ours
    assert "\x1b[31merror:\x1b[0m it broke" in broken


def test_verbose_log_line_contains_fields() -> None:
    logger, out = written("verbose")
    log_fields(logger, logging.INFO, FIELDS, SHORT)
    assert out.getvalue().endswith(" front INFO POST /v1/x id=ab status=200 error=-\n")


def test_json_log_line_contains_fields() -> None:
    logger, out = written("json")
    log_fields(logger, logging.INFO, FIELDS, SHORT)
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
