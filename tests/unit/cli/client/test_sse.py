"""The reader of server-sent events yields whole events, wherever the bytes are split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vlm_server.cli.client.answer import EventReader

STREAM = (
    'data: {"a":1}\n\n: a comment\n\ndata: zwölf\r\n\r\n'
    "event: x\ndata:1\ndata: 2\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a":1}', "zwölf".encode(), b"1\n2", b"[DONE]"]


def test_event_reader_splits_whole_stream():
    assert EventReader().feed(STREAM.encode()) == EVENTS


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=8))
def test_event_reader_handles_any_split_of_bytes(cuts: list[int]):
    stream = STREAM.encode()
    edges = [0, *sorted(cuts), len(stream)]
    reader = EventReader()
    events = []
    for start, end in pairwise(edges):
        events += reader.feed(stream[start:end])
    assert events == EVENTS


def test_event_reader_holds_back_unfinished_event():
    reader = EventReader()
    assert reader.feed(b"data: half") == []
    assert reader.feed(b"\n") == []
    assert reader.feed(b"\n") == [b"half"]
