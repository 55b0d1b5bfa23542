"""Data URLs become images and videos with their bytes, hash and size, within the limits."""

import hashlib
from base64 import b64encode

import msgspec
import pytest

from tests.support import video_files
from tests.support.image_files import data_url, encoded, image_file
from vlm_server.api.parsing.media.parse import parse_image, parse_video
from vlm_server.errors import InvalidImage, InvalidVideo, PayloadTooLarge, RequestError
from vlm_server.protocol import Image
from vlm_server.settings import Limits

PARAM = "messages[0].content[0]"


def test_parsed_image_keeps_its_bytes_and_their_hash() -> None:
    data = image_file("PNG", (40, 30))
    image = parse_image(data_url(data), PARAM, Limits())
    assert image.data == data
    assert image.content_hash == hashlib.sha256(data).hexdigest()
    assert (image.format, image.width, image.height, image.param) == ("PNG", 40, 30, PARAM)


def test_image_format_comes_from_bytes_despite_mime_type() -> None:
    image = parse_image(data_url(image_file("JPEG"), "image/png"), PARAM, Limits())
    assert image.format == "JPEG"


def test_images_of_equal_pixels_and_other_sizes_have_different_hashes() -> None:
    wide, tall = image_file("PNG", (40, 30)), image_file("PNG", (30, 40))
    keys = {parse_image(data_url(data), PARAM, Limits()).content_hash for data in (wide, tall)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("limits", "error"),
    [(Limits(max_image_bytes=50), PayloadTooLarge), (Limits(max_image_pixels=1199), InvalidImage)],
)
def test_parsed_image_obeys_limits(limits: Limits, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_image(data_url(image_file("PNG", (40, 30))), PARAM, limits)


JPEGS = [encoded(image, "JPEG") for image in video_files.noise(1, 2)]
FRAMES = "data:video/jpeg;base64," + ",".join(b64encode(jpeg).decode() for jpeg in JPEGS)
ONE_FRAME = b64encode(image_file("JPEG", (4, 3))).decode()


def test_frame_lists_of_all_forms_are_one_video() -> None:
    as_urls = [data_url(jpeg, "image/jpeg") for jpeg in JPEGS]
    video = parse_video(FRAMES, PARAM, Limits())
    assert video == parse_video(as_urls, PARAM, Limits())
    assert video.content_hash == parse_video(FRAMES, "messages[8]", Limits()).content_hash
    assert [image.data for image in msgspec.msgpack.decode(video.data, type=list[Image])] == JPEGS
    assert parse_video(as_urls[::-1], PARAM, Limits()).content_hash != video.content_hash


def test_parsed_video_has_hash_of_its_bytes() -> None:
    data = video_files.encode(video_files.noise(1, 3), "webm")
    video = parse_video(video_files.data_url(data, "mp4"), PARAM, Limits())
    assert (video.data, video.format, video.param) == (data, "WEBM", PARAM)
    assert video.content_hash == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("url", "limits", "error", "words"),
    [
        ("file:///etc/passwd", Limits(), InvalidVideo, "The video must be a base64 data URL"),
        ("https://127.0.0.1/a.mp4", Limits(), InvalidVideo, "urls.https_hosts"),
        ("data:video/mp4;base64,AAAA", Limits(), InvalidVideo, "not a readable MP4"),
        ("data:video/jpeg;base64,/9j/AAAA,/9j/AAAA", Limits(), InvalidVideo, "Frame 0 of the"),
        ("data:video/jpeg;base64,", Limits(), InvalidVideo, "Frame 0 of the video: The data is"),
        (FRAMES.rpartition(",")[0] + ",", Limits(), InvalidVideo, "Frame 1 of the video: The data"),
        (f"{FRAMES},{ONE_FRAME}", Limits(), InvalidVideo, "Frame 2 of the video has 4x3 pixels"),
        ("data:video/jpeg;base64" + "," * 10_000, Limits(), InvalidVideo, "at most 1024 images"),
        (FRAMES, Limits(max_video_bytes=1000), PayloadTooLarge, "The video is larger"),
        ([], Limits(), InvalidVideo, "1 to 1024 images; this one has 0"),
        (["x"] * 10_000, Limits(), InvalidVideo, "1 to 1024 images; this one has 10000"),
        (["x"], Limits(), InvalidVideo, "Frame 0 of the video: The image must be a base64"),
        ([video_files.data_url(b"x")], Limits(), InvalidVideo, "Frame 0 of the video: "),
        ("data:video/mp4;base64,AAAAAAAA", Limits(max_video_bytes=5), PayloadTooLarge, "The video"),
    ],
)
def test_non_videos_are_refused(
    url: str | list[str], limits: Limits, error: type[RequestError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        parse_video(url, PARAM, limits)
    assert caught.value.param == PARAM
