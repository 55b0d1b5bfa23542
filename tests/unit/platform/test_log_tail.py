"""The last lines of the log."""

from __future__ import annotations

import logging

from vlm_server.platform import log_tail
from vlm_server.platform.log_tail import MAX_CHARS, MAX_LINES, LogTail


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("vlm_server.x", logging.INFO, "", 0, "%s", (text,), None)


def test_tail_keeps_last_lines_and_numbers_all() -> None:
    tail = LogTail()
    for number in range(1, MAX_LINES + 11):
        tail.handle(record(str(number)))
    lines = tail.after(0)
    assert [line.number for line in lines] == list(range(11, MAX_LINES + 11))
    assert all(line.text == str(line.number) for line in lines)
    assert [line.number for line in tail.after(MAX_LINES + 8)] == [MAX_LINES + 9, MAX_LINES + 10]
    assert tail.after(MAX_LINES + 10) == []


def test_tail_cuts_long_lines_and_escapes_lone_surrogates() -> None:
    tail = LogTail()
    tail.handle(record("x" * (MAX_CHARS + 1)))
    tail.handle(record("a\ud800b"))
    long, odd = tail.after(0)
    assert long.text == "x" * MAX_CHARS + "…"
    assert odd.text.encode() == b"a\\ud800b"


def test_tail_keeps_traceback_of_exception() -> None:
    tail = LogTail()
    try:
        raise ValueError("why")
    except ValueError as error:
        exception = record("failed")
        exception.exc_info = (ValueError, error, error.__traceback__)
    tail.handle(exception)
    (line,) = tail.after(0)
    assert line.text.startswith("failed\nTraceback")
    assert line.text.endswith("ValueError: why")


def test_tail_names_engine_and_model_of_engine_line() -> None:
    tail = log_tail.keep_lines()
    log_tail.keep_engine_line("shapes", 12.5, logging.WARNING, "100 % done")
    (line,) = tail.after(0)
    assert (line.process, line.model, line.level) == ("engine", "shapes", "warning")
    assert (line.time, line.text) == (12.5, "100 % done")
