"""Repeated log lines of one kind are rate-limited."""

from __future__ import annotations

import logging

from vlm_server.cli.log import LogRate


def test_repeated_log_lines_are_bounded_and_counted() -> None:
    now = 0.0
    rate = LogRate(lines=3, seconds=10, clock=lambda: now)

    def passed(text: str, *values: object) -> str | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, values, None)
        return record.getMessage() if rate.filter(record) else None

    assert [passed("lost %d", n) for n in range(5)] == ["lost 0", "lost 1", "lost 2", None, None]
    assert passed("another") == "another"
    now = 10.0
    assert passed("lost %d", 6) == "lost 6 (and 2 more like it)"
    assert passed("lost %d", 7) == "lost 7"
