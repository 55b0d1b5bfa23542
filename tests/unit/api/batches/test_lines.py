"""Hostile lines of a batch's file."""

from __future__ import annotations

import io
import time

import pytest

from vlm_server.api.batches.lines import LineFile
from vlm_server.settings import BatchSettings

ROUTE = "/v1/chat/completions"
HEAD = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": '
MIB = 1 << 20


def checked(data: bytes) -> LineFile:
    lines = LineFile(io.BytesIO(data), ROUTE, BatchSettings())
    while lines.check_some():
        pass
    return lines


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"[" * 7 * MIB,
        HEAD + b'{"a":' * MIB,
        HEAD + b"[" * 100_000 + b"]" * 100_000 + b"}",
        HEAD + b'"\xff"}',
        HEAD + b"NaN}",
        HEAD + b"1}",
        HEAD.replace(b'"a"', rb'"\ud800"') + b"{}}",
        HEAD.replace(b'"a"', rb'"\n"') + b"{}}",
        HEAD.replace(b'"a"', b"1") + b"{}}",
        b"\x00" * 1000,
        b"[" + HEAD + b"{}}]",
        b"null",
    ],
    ids=lambda data: repr(data[-20:]),
)
def test_hostile_line_is_one_fault_within_second(data: bytes) -> None:
    start = time.monotonic()
    lines = checked(data + b"\n")
    assert time.monotonic() - start < 1
    assert [fault.line for fault in lines.faults] == [1]
    assert len(lines.faults[0].message) <= 200


def test_faults_are_bounded_in_number() -> None:
    assert len(checked(b"x\n" * 10_000).faults) == 20


def test_line_without_line_feed_is_read_no_further_than_its_limit() -> None:
    file = io.BytesIO(b"x" * 20 * MIB)
    lines = LineFile(file, ROUTE, BatchSettings())
    assert not lines.check_some()
    assert lines.faults[0].code == "line_too_large"
    assert file.tell() == BatchSettings().max_line_bytes + 1


def test_lines_are_read_in_any_order() -> None:
    ids = [b'"%d"' % i for i in range(700)]
    lines = checked(b"\n\n".join(HEAD.replace(b'"a"', name) + b"{}}" for name in ids))
    assert not lines.faults
    assert [lines.read(i).custom_id for i in (699, 0, 250)] == ["699", "0", "250"]
