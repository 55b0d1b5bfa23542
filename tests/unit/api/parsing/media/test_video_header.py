"""A video's container and completeness, read from its first bytes."""

import struct
from contextlib import suppress

import pytest

from tests.support import video_files
from vlm_server.api.parsing.media import video_header
from vlm_server.api.parsing.media.video_header import VideoHeader
from vlm_server.errors import InvalidVideo

PARAM = "messages[0].content[1]"
CONTAINERS = {"mp4": "MP4", "mov": "MP4", "webm": "WEBM", "matroska": "WEBM", "gif": "GIF"}
CODECS = {"mov": "mpeg4", "matroska": "mpeg4"}


def encoded(container: str) -> bytes:
    return video_files.encode(video_files.noise(1, 5), container, CODECS.get(container))


def read(data: bytes) -> VideoHeader:
    return video_header.read(data, PARAM)


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidVideo) as caught:
        video_header.read(data, PARAM)
    assert caught.value.param == PARAM
    return caught.value.message


@pytest.mark.parametrize("container", CONTAINERS)
def test_video_container_is_read_from_bytes(container: str) -> None:
    assert read(encoded(container)) == VideoHeader(CONTAINERS[container], is_cut=False)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("eighth", range(8))
def test_truncated_video_is_marked_or_refused(container: str, eighth: int) -> None:
    data = encoded(container)
    with suppress(InvalidVideo):
        assert read(data[: len(data) * eighth // 8]).is_cut


@pytest.mark.parametrize("container", CONTAINERS)
def test_video_missing_one_byte_is_marked_truncated(container: str) -> None:
    data = encoded(container)[:-1]
    if CONTAINERS[container] == "MP4":  # its index is at the end
        assert "is truncated" in refusal(data)
        data = video_files.index_first(encoded(container))
        assert not read(data).is_cut
        data = data[:-1]
    assert read(data).is_cut


def test_live_recording_has_no_declared_size() -> None:
    data = encoded("webm")
    start = data.index(b"\x18\x53\x80\x67") + 4
    size = 9 - data[start].bit_length()
    unknown = bytes([(2 << (8 - size)) - 1]) + b"\xff" * (size - 1)
    live = data[:start] + unknown + data[start + size :]
    assert read(live) == VideoHeader("WEBM", is_cut=False)


def test_mp4_box_may_be_64_bit_or_open_ended() -> None:
    kind = struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 0)
    index = struct.pack(">I4s", 8, b"moov")
    long = struct.pack(">I4sQ", 1, b"mdat", 20) + b"data"
    assert not read(kind + index + long).is_cut
    assert read(kind + index + long[:-1]).is_cut
    assert not read(kind + index + struct.pack(">I4s", 0, b"mdat") + b"x").is_cut
    assert "is truncated" in refusal(kind + struct.pack(">I4s", 0, b"mdat") + b"x")
    assert "is truncated" in refusal(kind + index[:-1])
    assert read(kind + index + struct.pack(">I4s", 3, b"mdat") * 9).is_cut


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"#EXTM3U\nhttp://127.0.0.1/a.ts",
        b"concat:/etc/passwd|/etc/hosts",
        b"rtsp://127.0.0.1/",
        b"RIFF\x10\0\0\0AVI LIST",
        b"RIFF\x10\0\0\0" + bytes(9),
        b"\x89PNG\r\n\x1a\n" + b"\0" * 99,
        b"\x1a\x45\xdf\xa3" + b"\x42\x82\x84mdoc" + b"\0" * 99,
        b"\x1a\x45\xdf\xa3",
    ],
    ids=["empty", "playlist", "concat", "rtsp", "avi", "riff", "png", "other EBML", "bare EBML"],
)
def test_non_video_bytes_are_refused_without_echo(data: bytes) -> None:
    message = refusal(data)
    readable, _, guess = message.partition(".")
    assert readable == "The video is not a readable MP4, MOV, WebM, Matroska or GIF"
    assert len(guess) < 50
    assert not any(name in guess for name in ("MP4", "MOV", "WebM", "Matroska", "GIF"))
