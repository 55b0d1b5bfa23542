"""Request heads and bodies are parsed alike from any fragments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_server.api.http.connection.parser import (
    MAX_HEAD_BYTES,
    MAX_HEAD_LINES,
    HeadReader,
    RequestParser,
)
from vlm_server.errors import HeadersTooLarge, InvalidRequest

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunks(size: int, count: int) -> bytes:
    return (b"%x\r\n" % size + b"x" * size + b"\r\n") * count


def body_of(parser: RequestParser) -> bytes:
    body = parser.parse()
    while parser.has_more:
        body += parser.parse()
    return body


@given(st.lists(st.integers(1, 40), max_size=8), st.sampled_from([b"", b"\r\n", b"\n\r\n"]))
def test_head_is_parsed_from_any_fragments(cuts: list[int], before: bytes) -> None:
    head = HEAD + b"\r\n"
    data, reader = before + head + b"rest", HeadReader()
    parsed_head = None
    for cut in [*cuts, len(data)]:
        reader.buffer += data[:cut]
        data = data[cut:]
        parsed_head = parsed_head or reader.take_head()
    assert parsed_head == head
    assert reader.buffer == b"rest"


@pytest.mark.parametrize(
    "data",
    [
        b"x" * (MAX_HEAD_BYTES + 1),
        HEAD + b"a: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"a\n" * (MAX_HEAD_LINES + 1),
        HEAD + b"a:\r\n" * MAX_HEAD_LINES + b"\r\n",
    ],
)
def test_oversized_head_is_refused(data: bytes) -> None:
    reader = HeadReader()
    reader.buffer += data
    with pytest.raises(HeadersTooLarge):
        reader.take_head()


def test_body_lines_do_not_count_as_headers() -> None:
    reader = HeadReader()
    reader.buffer += HEAD + b"\r\n" + b"\n" * 10_000
    assert reader.take_head() == HEAD + b"\r\n"


@given(st.lists(st.integers(1, 30), max_size=8))
def test_chunked_body_is_parsed_from_any_fragments(cuts: list[int]) -> None:
    data = chunks(1, 5) + chunks(16, 3) + b"0\r\n\r\nGET /"
    parser, body = RequestParser(CHUNKED), b""
    for cut in [*cuts, len(data)]:
        if not parser.is_complete:
            parser.feed(data[:cut])
            body += body_of(parser)
            data = data[cut:]
    assert body == b"x" * 53
    assert parser.is_complete
    assert (parser.rest + data).endswith(b"GET /")


def test_chunked_body_is_parsed_in_small_slices() -> None:
    parser = RequestParser(CHUNKED)
    parser.feed(chunks(1, 1000) + b"0\r\n\r\n")
    slices = [parser.parse()]
    while parser.has_more:
        slices.append(parser.parse())
    assert bytearray().join(slices) == b"x" * 1000
    assert max(map(len, slices)) < 100
    assert parser.is_complete


@pytest.mark.parametrize("piece", [chunks(1, 100), b"1;" + b"a" * 1000 + b"\r\nx\r\n"])
def test_endless_small_chunks_are_refused(piece: bytes) -> None:
    parser = RequestParser(CHUNKED)

    def send_on() -> None:
        for _ in range(10_000):
            parser.feed(piece)
            body_of(parser)

    with pytest.raises(InvalidRequest, match="small chunks"):
        send_on()


@pytest.mark.parametrize(("size", "count"), [(1, 20_000), (600, 20_000)])
def test_small_and_large_chunks_of_clients_are_accepted(size: int, count: int) -> None:
    parser, num_bytes = RequestParser(CHUNKED), 0
    for _ in range(count // 100):
        parser.feed(chunks(size, 100))
        num_bytes += len(body_of(parser))
    assert num_bytes == size * count


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Content-Length: " + b"1" * 5000 + b"\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: Chunked\r\n\r\n",
        CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD + b"secret header\r\n\r\n",
    ],
)
def test_bad_head_is_refused_without_echo(head: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RequestParser(head)
    assert "secret" not in caught.value.message


def test_remaining_bytes_are_known_from_content_length() -> None:
    parser = RequestParser(HEAD + b"Content-Length: 10\r\n\r\n")
    parser.feed(b"abc")
    assert (parser.parse(), parser.remaining_bytes) == (b"abc", 7)
    assert RequestParser(CHUNKED).remaining_bytes is None
    assert RequestParser(HEAD + b"\r\n").remaining_bytes == 0
