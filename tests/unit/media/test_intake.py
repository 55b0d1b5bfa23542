import hashlib

import pytest

from tests.unit.media.pictures import data_url, encoded
from vlm_server.errors import InvalidImage, PayloadTooLarge
from vlm_server.media.intake import take_image
from vlm_server.settings import Limits

PARAM = "messages[0].content[0]"


def test_a_picture_travels_as_it_came_and_is_keyed_by_all_its_bytes() -> None:
    data = encoded("PNG", (40, 30))
    image = take_image(data_url(data), PARAM, Limits())
    assert image.data == data
    assert image.mm_hash == hashlib.sha256(data).hexdigest()
    assert (image.format, image.width, image.height, image.param) == ("PNG", 40, 30, PARAM)


def test_the_bytes_decide_whatever_the_mime_type_says() -> None:
    image = take_image(data_url(encoded("JPEG"), "image/png"), PARAM, Limits())
    assert image.format == "JPEG"


def test_twins_of_equal_pixels_have_keys_of_their_own() -> None:
    wide, tall = encoded("PNG", (40, 30)), encoded("PNG", (30, 40))
    keys = {take_image(data_url(data), PARAM, Limits()).mm_hash for data in (wide, tall)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("limits", "error"),
    [(Limits(max_image_bytes=50), PayloadTooLarge), (Limits(max_image_pixels=1199), InvalidImage)],
)
def test_limits_hold(limits: Limits, error: type[Exception]) -> None:
    with pytest.raises(error):
        take_image(data_url(encoded("PNG", (40, 30))), PARAM, limits)
