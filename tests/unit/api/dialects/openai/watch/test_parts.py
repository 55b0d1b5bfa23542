"""Parts of multipart bodies, however they are cut on their way."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_server.api.dialects.openai.watch.parts import PartReader, boundary_of
from vlm_server.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType

MAX_BYTES = 10_000
CONTENTS = (b'{"question": "?"}', b"\xff\xd8" + bytes(range(256)) * 4 + b"\r\n--x\r\n", b"\n", b"")


def body_of(contents: tuple[bytes, ...], *, declares: bool, end: str = "\r\n") -> bytes:
    parts = []
    for content in contents:
        length = f"Content-Length: {len(content)}{end}" if declares else ""
        head = f"--frame{end}Content-Type: image/jpeg{end}{length}{end}"
        parts.append(head.encode() + content + end.encode())
    return b"".join(parts) + f"--frame--{end}".encode()


def read(reader: PartReader, pieces: list[bytes]) -> list[bytes]:
    return [part for piece in pieces for part in reader.feed(piece)]


@given(st.lists(st.integers(0, 3000), max_size=20), st.booleans(), st.sampled_from(["\r\n", "\n"]))
def test_parts_do_not_depend_on_cuts(cuts: list[int], declares: bool, end: str) -> None:
    body = body_of(CONTENTS, declares=declares, end=end)
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(places)]
    reader = PartReader(b"--frame", MAX_BYTES)
    assert read(reader, pieces) == list(CONTENTS)
    assert reader.is_over


def test_boundaries_are_read_as_cameras_write_them() -> None:
    kind = "multipart/x-mixed-replace"
    for text in ("; boundary=frame", ';boundary="frame"', "; charset=x; Boundary=--frame"):
        assert boundary_of(kind + text) == b"--frame"
    for text in ("", "; boundary=", "; boundary=" + "x" * 71 + '"'):
        with pytest.raises(UnsupportedMediaType):
            boundary_of(kind + text)


@given(st.lists(st.binary(max_size=400), max_size=40))
def test_hostile_bodies_end_in_bounded_memory(pieces: list[bytes]) -> None:
    reader = PartReader(b"--frame", 200)
    with suppress(InvalidRequest, PayloadTooLarge):
        for piece in pieces:
            for part in reader.feed(piece):
                assert len(part) <= 200
            assert len(reader._buffer) <= 2 * 8192 + 1000


@pytest.mark.parametrize(
    "body",
    [
        b"x" * 9000,
        b"--frame\r\n" + b"A: b\r\n" * 2000,
        b"--frame\r\n\r\n" + b"x" * 20_000,
        b"--frame\r\nContent-Length: 999999999999\r\n\r\n",
        b"--frame\r\n\r\n" + b"x" * 10_003 + b"--frame",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_endless_parts_are_refused(body: bytes) -> None:
    with pytest.raises((InvalidRequest, PayloadTooLarge)):
        read(PartReader(b"--frame", MAX_BYTES), [body])
