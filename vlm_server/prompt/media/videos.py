"""The decoding of sampled frames with PyAV, in a process that may hang, crash or be killed.

All packets are read first: their timestamps say when each frame is shown, whatever the header
claims. Then only packets between a key frame and a sampled frame are decoded. A truncated or broken
last packet is left out.
"""

from __future__ import annotations

import io
from collections import deque
from dataclasses import dataclass
from itertools import groupby

import av
import msgspec
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image as PillowImage

from vlm_server.errors import InvalidImage, InvalidVideo
from vlm_server.platform.child.messages import Parts
from vlm_server.prompt.media.images import decode_rgb
from vlm_server.prompt.media.messages import Frames, VideoJob, pack
from vlm_server.prompt.media.sampling import frame_size, sample, sample_list
from vlm_server.protocol import FRAME_LIST, Image
from vlm_server.settings import VideoSettings

_DEMUXERS = {"MP4": "mov", "WEBM": "matroska", "GIF": "gif"}
CODECS = frozenset({"h264", "hevc", "av1", "mpeg4", "vp8", "vp9", "gif"})
_OPTIONS = {"protocol_whitelist": "none", "enable_drefs": "0"}
"""Options against demuxers that open other files named in a file."""
_UNSIZED = "GIF"
"""A format without frame lengths: the last frame of a truncated file may be truncated, too."""
_THREADS = 2


def decode_job(job: bytearray) -> Parts:
    """The answer to a job of the process that decodes videos: the sampled, complete frames.

    Raises InvalidVideo, and PyAV's errors for broken data.
    """
    decoded = msgspec.msgpack.decode(job, type=VideoJob)
    return decode_list(decoded) if decoded.video.format == FRAME_LIST else _decode_file(decoded)


def _decode_file(job: VideoJob) -> Parts:
    video, limits = job.video, job.limits
    with av.open(
        io.BytesIO(video.data), "r", format=_DEMUXERS[video.format], options=_OPTIONS
    ) as container:
        stream = _video_stream(container)
        _check_size(stream.width, stream.height, limits)
        stream.codec_context.thread_count = _THREADS
        stream.codec_context.thread_type = "AUTO"
        stream.codec_context.options = {"max_pixels": str(limits.max_frame_pixels)}
        packets, is_cut = _read_packets(container, stream)
        if video.is_cut and video.format == _UNSIZED:
            packets.pop()
        timeline = _timeline(packets, stream)
        if timeline.duration > limits.max_seconds:
            raise InvalidVideo(
                f"The video is longer than {limits.max_seconds:g} seconds (video.max_seconds)."
            )
        try:
            return _decode_samples(stream, timeline, job, is_cut=is_cut or video.is_cut)
        except (InvalidVideo, av.FFmpegError):
            if len(packets) < 2:
                raise
            stream.codec_context.flush_buffers()
            return _decode_samples(stream, _timeline(packets[:-1], stream), job, is_cut=True)


def _read_packets(
    container: InputContainer, stream: VideoStream
) -> tuple[list[Packet[VideoStream]], bool]:
    """All packets in decoding order, and whether a truncated last one was left out.

    Raises InvalidVideo if packets follow a truncated one.
    """
    packets: list[Packet[VideoStream]] = []
    is_cut = False
    for packet in container.demux(stream):
        if packet.is_corrupt:
            is_cut = True
        elif packet.size:
            if is_cut:
                raise InvalidVideo("The video is damaged.")
            packets.append(packet)
    if not packets:
        raise InvalidVideo("The video has no frames.")
    return packets, is_cut


def _decode_samples(
    stream: VideoStream, timeline: _Timeline, job: VideoJob, *, is_cut: bool
) -> Parts:
    """The sampled frames, all with the width and height of the first."""
    limits, wanted = job.limits, job.video.sampling
    samples = sample(timeline.times, timeline.duration, limits, wanted)
    decoder = _Decoder(stream, timeline)
    size: tuple[int, int] | None = None
    turns, pixels = list[int](), list[bytes]()
    for index, duplicates in groupby(frame.index for frame in samples):
        frame = decoder.frame_at(timeline.shown[index])
        _check_size(frame.width, frame.height, limits)
        stored_size = frame.width, frame.height
        size = size or frame_size(stored_size, len(samples), limits, wanted, job.factor)
        count = len(list(duplicates))
        turns += [round(frame.rotation / 90) % 4] * count
        pixels += [_rgb(frame, *size)] * count
    assert size is not None
    seconds = tuple(frame.seconds for frame in samples)
    return pack(Frames(*size, seconds, tuple(turns), is_cut), pixels)


@dataclass(frozen=True, slots=True)
class _Timeline:
    """All packets in decoding order, and the times of their frames in presentation order.

    keys: (time, packet index) of key frames. shown: times of all frames, ascending, in the stream's
    time base. times: the same in seconds, from 0 on. duration: seconds to the last frame's end.
    """

    packets: list[Packet[VideoStream]]
    keys: list[tuple[int, int]]
    shown: list[int]
    times: list[float]
    duration: float

    def start_for(self, time: int) -> int:
        """The index of the packet from which the frame shown at `time` is decoded.

        A frame decoded after a key frame but shown before it needs the previous key frame.
        """
        return next((number for shown_at, number in reversed(self.keys) if shown_at <= time), 0)


def _video_stream(container: InputContainer) -> VideoStream:
    streams = [s for s in container.streams.video if s.codec_context is not None]
    if not streams:
        raise InvalidVideo("The file has no video stream.")
    stream = streams[0]
    if stream.codec_context.codec.canonical_name not in CODECS:
        raise InvalidVideo(f"The video's codec is not one of {', '.join(sorted(CODECS))}.")
    return stream


def _check_size(width: int, height: int, limits: VideoSettings) -> None:
    if width * height > limits.max_frame_pixels:
        raise InvalidVideo(
            f"The video's frames have more than {limits.max_frame_pixels} pixels "
            "(video.max_frame_pixels)."
        )
    if width * height <= 0:
        raise InvalidVideo("The video's frames have no pixels.")


def _timeline(packets: list[Packet[VideoStream]], stream: VideoStream) -> _Timeline:
    packets_with_frames = [
        packet for packet in packets if packet.pts is not None and not packet.is_discard
    ]
    unit = stream.time_base
    if not packets_with_frames or unit is None:
        raise InvalidVideo("The video has no frames.")
    last_packet = max(packets_with_frames, key=_pts)
    shown_times = sorted({_pts(packet) for packet in packets_with_frames})
    return _Timeline(
        packets=packets,
        keys=[
            (_pts(packet), number)
            for number, packet in enumerate(packets)
            if packet.is_keyframe and packet.pts is not None
        ],
        shown=shown_times,
        times=[float((time - shown_times[0]) * unit) for time in shown_times],
        duration=float((shown_times[-1] - shown_times[0] + (last_packet.duration or 0)) * unit),
    )


def _pts(packet: Packet[VideoStream]) -> int:
    assert packet.pts is not None
    return packet.pts


class _Decoder:
    """Decodes the frames shown at given times, in ascending order."""

    def __init__(self, stream: VideoStream, timeline: _Timeline) -> None:
        self._context = stream.codec_context
        self._timeline = timeline
        self._next_packet = 0
        self._pending: deque[VideoFrame] = deque()
        self._newest: VideoFrame | None = None

    def frame_at(self, time: int) -> VideoFrame:
        """The frame shown at `time` (in the stream's time base). Raises InvalidVideo."""
        start = self._timeline.start_for(time)
        if start > self._next_packet:
            self._context.flush_buffers()
            self._pending.clear()
            self._next_packet = start
        while not _is_shown_by(self._newest, time):
            self._newest = self._next_frame()
        assert self._newest is not None
        if self._newest.is_corrupt:
            raise InvalidVideo("The video is damaged.")
        return self._newest

    def _next_frame(self) -> VideoFrame:
        """The next frame in presentation order."""
        packets = self._timeline.packets
        while not self._pending:
            if self._next_packet > len(packets):
                raise InvalidVideo("Not all frames of the video can be decoded.")
            at_end = self._next_packet == len(packets)
            packet = None if at_end else packets[self._next_packet]
            self._pending += self._context.decode(packet)
            self._next_packet += 1
        return self._pending.popleft()


def _is_shown_by(frame: VideoFrame | None, time: int) -> bool:
    return frame is not None and frame.pts is not None and frame.pts >= time


def _rgb(frame: VideoFrame, width: int, height: int) -> bytes:
    (plane,) = frame.reformat(width, height, "rgb24", interpolation="BICUBIC").planes
    rows, row_bytes = memoryview(plane), plane.line_size
    starts = range(0, height * row_bytes, row_bytes)
    return b"".join(rows[start : start + width * 3] for start in starts)


# ---- lists of frames ---------------------------------------------------------------------


def decode_list(job: VideoJob) -> Parts:
    """The sampled frames of a list, all of the size of the first. Raises InvalidVideo."""
    images = msgspec.msgpack.decode(job.video.data, type=list[Image])
    samples = sample_list(len(images), job.limits, job.video.sampling)
    original: tuple[int, int] | None = None
    size, pixels = (0, 0), list[bytes]()
    for wanted in samples:
        frame = _decode(images[wanted.index], wanted.index, job.limits.max_frame_pixels)
        if original is None:
            original = frame.size
            size = frame_size(original, len(samples), job.limits, job.video.sampling, job.factor)
        if frame.size != original:
            raise InvalidVideo(
                f"Frame {wanted.index} of the video differs in size from those before it."
            )
        if frame.size != size:
            frame = frame.resize(size, PillowImage.Resampling.BICUBIC)
        pixels.append(frame.tobytes())
    seconds = tuple(each.seconds for each in samples)
    return pack(Frames(*size, seconds, (0,) * len(samples)), pixels)


def _decode(image: Image, number: int, max_pixels: int) -> PillowImage.Image:
    if image.width * image.height > max_pixels:
        raise InvalidVideo(
            f"The video's frames have more than {max_pixels} pixels (video.max_frame_pixels)."
        )
    try:
        return decode_rgb(image)
    except InvalidImage as error:
        raise InvalidVideo(f"Frame {number} of the video: {error.message}.") from None
