"""The decoding process samples real videos correctly, and refuses damaged or costly ones."""

from __future__ import annotations

import io
import os
import struct
import sys
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import av
import numpy as np
import pytest
from msgspec.structs import replace

from tests.support import video_files
from tests.support.child_pids import children_of
from tests.support.whole_run import few_of
from vlm_server.api.parsing.media import video_header
from vlm_server.errors import InvalidVideo
from vlm_server.platform.child.cancellation import Cancellation, Cancelled
from vlm_server.platform.child.pool import ChildPool
from vlm_server.prompt.media.decoders import Clip, Decoders
from vlm_server.protocol import Video
from vlm_server.settings import ImageSettings, VideoSettings

PARAM = "messages[0].content[1]"
FORMATS = {"mp4": "MP4", "mov": "MP4", "webm": "WEBM", "matroska": "WEBM", "gif": "GIF"}


DECODERS = Decoders(ImageSettings(), VideoSettings(), 1)


def decode(data: bytes, name: str = "MP4", **limits: object) -> Clip:
    video = Video(data, "key", name, PARAM, is_cut=video_header.read(data, PARAM).is_cut)
    return DECODERS.video(video, replace(VideoSettings(), **limits), Cancellation())


def refusal(data: bytes, name: str = "MP4", **limits: object) -> str:
    with pytest.raises(InvalidVideo) as caught:
        decode(data, name, **limits)
    assert caught.value.param == PARAM
    return caught.value.message


def levels(shown: Clip) -> list[float]:
    return [float(frame.mean()) for frame in shown.frames]


# ---- videos that are read ---------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("mp4", "libx265"),
        ("mp4", "mpeg4"),
        ("mp4", "libsvtav1"),
        ("mov", "libx264"),
        ("webm", "libvpx"),
        ("webm", "libvpx-vp9"),
        ("matroska", "libx264"),
        ("gif", "gif"),
    ],
)
def test_video_formats_decode_frames_in_order(container: str, codec: str) -> None:
    options = {"log-level": "none"} if codec == "libx265" else None
    data = video_files.encode(
        video_files.moving("right", 30), container, codec, fps=10, options=options
    )
    shown = decode(data, FORMATS[container])
    assert shown.frames.shape == (6, 240, 320, 3)
    assert shown.frames.dtype == np.uint8
    assert shown.seconds == pytest.approx([0, 0.58, 1.16, 1.74, 2.32, 2.9], abs=0.01)
    centers = [float((frame[..., 1] < 100).nonzero()[1].mean()) for frame in shown.frames]
    assert centers == pytest.approx(np.linspace(36, 284, 6), abs=9)


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9")])
def test_video_seeking_by_key_frames_gives_right_frames(container: str, codec: str) -> None:
    frames = video_files.greys(range(10, 250), (64, 48))
    data = video_files.encode(frames, container, codec, fps=10, options={"g": "12"})
    shown = decode(data, FORMATS[container], max_frames=8)
    assert levels(shown) == pytest.approx(np.linspace(10, 249, 8), abs=6)


def test_gif_frames_build_on_previous_frame() -> None:
    data = video_files.encode(video_files.moving("down", 100, (128, 128), 16), "gif", fps=10)
    shown = decode(data, "GIF", max_frames=4)
    for frame in shown.frames:
        assert 0.02 < (frame[..., 1] < 100).mean() < 0.09  # one disc, and no trace of others


def test_variable_frame_rate_is_sampled_by_time() -> None:
    times = [0, 4000, 4100, 4200, 4300, 8000]
    data = video_files.encode(video_files.greys([0, 50, 100, 150, 200, 250]), "mp4", times_ms=times)
    shown = decode(data, fps=1)
    assert shown.seconds == pytest.approx(np.linspace(0, 8, len(shown.seconds)))
    assert levels(shown)[:3] == pytest.approx([0, 0, 0], abs=6)
    assert levels(shown)[-2:] == pytest.approx([200, 250], abs=6)


@pytest.mark.parametrize(("rotation", "corner"), [(0, (0, 0)), (90, (1, 0)), (180, (1, 1))])
def test_video_rotation_is_applied(rotation: int, corner: tuple[int, int]) -> None:
    """The corner that becomes dark, as (row, column), if the stored top left is dark."""
    image = video_files.greys([250], (64, 48))[0]
    image.paste((0, 0, 0), (0, 0, 20, 20))
    shown = decode(video_files.encode([image] * 4, rotation=rotation))
    assert shown.frames.shape[1:3] == ((64, 48) if rotation == 90 else (48, 64))
    assert shown.frames[0][-corner[0], -corner[1]].max() < 60


def test_video_frames_are_downscaled_with_aspect_ratio() -> None:
    assert decode(video_files.encode(video_files.greys([9] * 4, (640, 360)))).frames.shape == (
        4,
        288,
        512,
        3,
    )


def test_gif_still_is_one_frame() -> None:
    assert decode(video_files.encode(video_files.greys([9]), "gif"), "GIF").seconds == (0.0,)


# ---- refused videos ------------------------------------------------------------------


def test_damaged_video_is_refused() -> None:
    whole = bytearray(video_files.encode(video_files.noise(1, 40, (320, 240))))
    start = whole.index(b"mdat")
    whole[start + 800 : start + 30_000] = os.urandom(29_200)
    assert "damaged" in (message := refusal(bytes(whole))) or "decode" in message


@pytest.mark.parametrize("eighths", few_of(range(8), (0, 2, 7)))
@pytest.mark.parametrize("container", ["mp4", "webm", "gif"])
def test_truncated_video_raises_only_invalid_video(container: str, eighths: int) -> None:
    data = video_files.encode(video_files.noise(2, 6), container)
    with suppress(InvalidVideo):
        decode(data[: 8 + len(data) * eighths // 8], FORMATS[container])


STREAMED = {
    "mp4": lambda frames: video_files.index_first(
        video_files.encode(frames, options={"bf": "0", "g": "99"})
    ),
    "webm": lambda frames: video_files.encode(frames, "webm"),
    "matroska": lambda frames: video_files.encode(frames, "matroska", "mpeg4"),
    "gif": lambda frames: video_files.encode(frames, "gif"),
}


@pytest.mark.parametrize(
    ("share", "container"),
    few_of(
        product((1.0, 0.9), STREAMED),
        [(1.0, "mp4"), (0.9, "webm"), (0.9, "matroska"), (0.9, "gif")],
    ),
)
def test_truncated_video_shows_whole_frames_and_is_cut(container: str, share: float) -> None:
    """Cut to `share` of its size, or without the end of its last packet."""
    whole = STREAMED[container](video_files.moving("right", 30))
    all_of_it = decode(whole, FORMATS[container])
    assert not all_of_it.is_cut
    size = whole.rindex(b"\x1c\x53\xbb\x6b") if FORMATS[container] == "WEBM" else len(whole)
    shown = decode(whole[: int(size * share) - 9], FORMATS[container])
    assert shown.is_cut
    assert 4 <= len(shown.seconds) <= len(all_of_it.seconds)
    assert shown.seconds[-1] < all_of_it.seconds[-1]
    centers = [float((frame[..., 1] < 100).nonzero()[1].mean()) for frame in shown.frames]
    expected = 36 + np.array(shown.seconds) / 2.9 * 248
    assert centers == pytest.approx(expected, abs=12)


@pytest.mark.parametrize("container", STREAMED)
def test_video_with_broken_last_packet_shows_earlier_frames(container: str) -> None:
    whole = STREAMED[container](video_files.noise(1, 12))
    with av.open(io.BytesIO(whole)) as opened:
        last = [bytes(packet) for packet in opened.demux(video=0) if packet.size][-1]
    broken = whole.replace(last, bytes(len(last)))
    assert broken != whole
    all_of_it, shown = (decode(data, FORMATS[container]) for data in (whole, broken))
    assert shown.is_cut
    assert shown.seconds[-1] < all_of_it.seconds[-1]
    assert np.array_equal(shown.frames[0], all_of_it.frames[0])


@pytest.mark.parametrize("container", STREAMED)
def test_video_without_whole_frame_is_refused(container: str) -> None:
    whole = STREAMED[container](video_files.noise(1, 12))
    with av.open(io.BytesIO(whole)) as opened:
        first = next(bytes(packet) for packet in opened.demux(video=0) if packet.size)
    with pytest.raises(InvalidVideo):
        decode(whole[: whole.index(first) + len(first) // 2], FORMATS[container])


def test_playlist_and_concat_bytes_are_refused_as_video() -> None:
    playlist = b"#EXTM3U\nfile:///etc/passwd\n" * 9
    for data, name in ((playlist, "MP4"), (b"concat:/etc/passwd|/etc/hosts", "WEBM")):
        with pytest.raises(InvalidVideo, match="can't be decoded"):
            DECODERS.video(Video(data, "key", name, PARAM), VideoSettings(), Cancellation())


def test_audio_only_file_is_refused_as_video() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=16_000, layout="mono")
        for _ in range(20):
            samples = np.zeros((1, 1024), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate = 16_000
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    assert "no video" in refusal(buffer.getvalue())


def test_unsupported_video_codec_is_refused() -> None:
    data = video_files.encode(video_files.greys([9] * 4), "matroska", "ffv1")
    assert "codec" in refusal(data, "WEBM")


def test_video_beyond_max_pixels_is_refused() -> None:
    clip = video_files.encode(video_files.greys([9] * 4))
    assert "3000 pixels" in refusal(clip, max_frame_pixels=3000)


def test_gif_with_huge_header_size_is_refused() -> None:
    data = bytearray(video_files.encode(video_files.greys([9] * 4), "gif"))
    data[6:10] = struct.pack("<HH", 16_384, 16_384)
    assert "pixels" in refusal(bytes(data), "GIF")


@pytest.mark.parametrize("value", few_of([0, 1, 0x7FFFFFFF, 0xFFFFFFFF], [0, 0xFFFFFFFF]))
@pytest.mark.parametrize(
    ("box", "offset"),
    [(b"stts", 8), (b"stts", 12), (b"stsz", 4), (b"stsz", 8), (b"mdhd", 12), (b"mdhd", 16)],
    ids=["frames", "frame time", "frame size", "sizes", "time unit", "duration"],
)
def test_false_mp4_header_fields_are_refused_or_ignored(
    box: bytes, offset: int, value: int
) -> None:
    data = bytearray(video_files.encode(video_files.noise(1, 6)))
    struct.pack_into(">I", data, data.index(box) + 4 + offset, value)
    started = time.monotonic()
    with suppress(InvalidVideo):
        assert decode(bytes(data)).frames.shape[1:] == (64, 96, 3)
    assert time.monotonic() - started < 10, "the deadline should not be needed"


@pytest.mark.parametrize("times", [[0, 500, 36_000_000], [0, 500, 700_000]])
def test_video_beyond_max_duration_is_refused(times: list[int]) -> None:
    data = video_files.encode(video_files.greys([9] * 3), "matroska", "mpeg4", times_ms=times)
    assert "600 seconds" in refusal(data, "WEBM")


# ---- a process that can be killed ------------------------------------------------------


VIDEO = Video(b"x" * (1 << 20), "key", "MP4", PARAM)


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoders:
    """Decoders whose processes run the parameter's program instead of decoding."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    decoders = Decoders(ImageSettings(), VideoSettings(), 1)
    decoders._videos = ChildPool("tests.unit.prompt.media.program", 1, request.param)
    return decoders


HANGS = "import time; time.sleep(60)"


@pytest.mark.parametrize("program", [HANGS], indirect=True)
def test_hanging_video_decoder_is_killed_at_deadline(program: Decoders) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidVideo, match=r"over 0\.5 seconds"):
        program.video(VIDEO, VideoSettings(decode_timeout_seconds=0.5), Cancellation())
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("program", [HANGS], indirect=True)
@pytest.mark.parametrize("delay_seconds", [0.0, 0.3])
def test_video_decoder_is_killed_on_cancellation(
    program: Decoders, delay_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    cancellation = Cancellation()
    if delay_seconds:
        threading.Timer(delay_seconds, cancellation.cancel).start()
    else:
        cancellation.cancel()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        program.video(VIDEO, VideoSettings(), cancellation)
    assert time.monotonic() - started < 10
    assert not caplog.records, "nothing is wrong with the video"


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.abort()",
        "import sys; sys.stdin.buffer.read(9)",
        "print('nonsense' * 999)",
        "import sys; sys.stdout.buffer.write(bytes(7) + b'\\5' + bytes(6))",
    ],
    indirect=True,
)
def test_dying_video_decoder_fails_request(
    program: Decoders, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidVideo, match="can't be decoded"):
        program.video(VIDEO, VideoSettings(decode_timeout_seconds=10), Cancellation())
    assert "died" in caplog.text


def test_video_decoder_process_is_not_reused() -> None:
    """So nothing of one video can appear in the next."""
    before = set(children_of(os.getpid()))
    decode(video_files.encode(video_files.moving("up", 10)))
    assert set(children_of(os.getpid())) <= before


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such limit")
def test_video_decoder_memory_is_bounded() -> None:
    """The frames take 300 MB."""
    data = video_files.encode(video_files.greys([9] * 4, (4000, 2200)))
    assert decode(data).frames.shape[0] == 4
    small_pool = Decoders(
        ImageSettings(), replace(VideoSettings(), max_decode_memory_bytes=200 << 20), 1
    )
    with pytest.raises(InvalidVideo):
        small_pool.video(Video(data, "key", "MP4", PARAM), VideoSettings(), Cancellation())


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_video_without_key_frame_is_refused(container: str) -> None:
    """The other frames only describe changes of the missing one."""
    source = av.open(
        io.BytesIO(video_files.encode(video_files.noise(1, 12), container, options={"g": "99"}))
    )
    buffer = io.BytesIO()
    with source, av.open(buffer, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size and not packet.is_keyframe:
                packet.stream = stream
                output.mux(packet)
    started = time.monotonic()
    with pytest.raises(InvalidVideo):
        decode(buffer.getvalue(), FORMATS[container])
    assert time.monotonic() - started < 10
