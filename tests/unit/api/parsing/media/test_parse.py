"""Data URLs become images and videos with their bytes, hash and size, within the limits."""

import hashlib

import pytest

from tests.support import video_files
from tests.support.image_files import data_url, image_file
from vlm_server.api.parsing.media.parse import parse_image, parse_video
from vlm_server.errors import InvalidImage, InvalidVideo, PayloadTooLarge, RequestError
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
        ("data:video/jpeg;base64,/9j/AAAA,/9j/AAAA", Limits(), InvalidVideo, "frames as images"),
        ("data:video/mp4;base64,AAAAAAAA", Limits(max_video_bytes=5), PayloadTooLarge, "The video"),
    ],
)
def test_non_videos_are_refused(
    url: str, limits: Limits, error: type[RequestError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        parse_video(url, PARAM, limits)
    assert caught.value.param == PARAM
