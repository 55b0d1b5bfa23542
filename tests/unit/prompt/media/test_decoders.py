"""Decoding processes give the same pixels as decoding in process, at a bounded cost."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from PIL import Image as PillowImage

from tests.support.child_pids import children_of
from tests.support.image_files import heic, slow_jpeg
from vlm_server import settings
from vlm_server.errors import DecodeBudgetExceeded, InvalidImage
from vlm_server.platform.child import launch
from vlm_server.platform.child.cancellation import Cancellation, Cancelled
from vlm_server.prompt.media.decoders import DecodeBudget, Decoders
from vlm_server.prompt.media.images import decode_rgb
from vlm_server.protocol import Image

PARAM = "messages[0].content[1]"


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    decoders = Decoders(settings.ImageSettings(), settings.VideoSettings(), 2)
    yield decoders
    decoders.close()
    assert decoders.num_tracked == 0


def image_of(data: bytes, size: tuple[int, int], name: str = "PNG", **fields: object) -> Image:
    return Image(data, "hash", name, *size, PARAM, **fields)  # type: ignore[arg-type]


def encoded(image: PillowImage.Image, name: str = "PNG", **options: object) -> Image:
    if name == "HEIC":
        return image_of(heic(image), image.size, name)
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return image_of(buffer.getvalue(), image.size, name)


def budget(cancellation: Cancellation | None = None, **limits: object) -> DecodeBudget:
    return DecodeBudget(settings.ImageSettings(**limits), cancellation or Cancellation())


SLOW = image_of(slow_jpeg(2000, 100_000), (2000, 2000), "JPEG")
"""A JPEG that takes minutes to decode."""
SMALL = encoded(PillowImage.new("RGB", (64, 64), "red"))


def gradient(mode: str, size: tuple[int, int] = (61, 47)) -> PillowImage.Image:
    red = PillowImage.linear_gradient("L").resize(size)
    green, blue = red.rotate(90), PillowImage.radial_gradient("L").resize(size)
    rgba = PillowImage.merge(
        "RGBA", (red, green, blue, PillowImage.radial_gradient("L").resize(size))
    )
    return rgba.convert(mode)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")),
        *(("JPEG", mode) for mode in ("RGB", "L", "CMYK")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
        ("GIF", "P"),
        *(("TIFF", mode) for mode in ("RGB", "1", "I;16")),
        ("BMP", "RGB"),
        ("AVIF", "RGBA"),
        ("HEIC", "RGB"),
    ],
)
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("side", [None, 32])
def test_decoder_process_gives_same_pixels_as_in_process(
    decoders: Decoders, name: str, mode: str, orientation: int, side: int | None
):
    exif = PillowImage.Exif()
    exif[0x0112] = orientation
    options = {} if name == "GIF" else {"exif": exif}
    drawing = gradient("L" if mode == "I;16" else mode)
    if mode == "I;16":
        drawing = drawing.convert("I").point(lambda value: value * 255).convert("I;16")
    file = encoded(drawing, name, **options)
    size = drawing.size[::-1] if name == "TIFF" and orientation == 6 else drawing.size
    image = image_of(file.data, size, name, max_side_pixels=side)
    here, there = decode_rgb(image), decoders.image(image, budget())
    assert there.shape == (here.height, here.width, 3)
    assert there.tobytes() == here.tobytes()


def test_decoder_process_returns_large_image_whole(decoders: Decoders):
    """It comes in many parts; its process, which held much memory, is not reused."""
    image = gradient("RGB", (7001, 2003))
    found = decoders.image(encoded(image, compress_level=1), budget())
    assert found.tobytes() == image.tobytes()
    assert decoders.image(SMALL, budget()).shape == (64, 64, 3)


@pytest.mark.alone
def test_decoder_memory_suffices_for_largest_transparent_image(
    decoders: Decoders,
):
    image = PillowImage.new("RGBA", (7071, 7071), (0, 0, 0, 0))
    found = decoders.image(encoded(image, compress_level=1), budget())
    assert found[7070, 7070].tolist() == [255, 255, 255]


def test_image_beyond_decoder_memory_is_refused():
    little = Decoders(
        settings.ImageSettings(max_decode_memory_bytes=256 << 20), settings.VideoSettings(), 1
    )
    image = PillowImage.new("RGBA", (5000, 5000), (0, 0, 0, 0))
    with pytest.raises(InvalidImage, match="too much memory"):
        little.image(encoded(image, compress_level=1), budget())
    assert little.image(SMALL, budget()).shape == (64, 64, 3)
    little.close()


def test_damaged_image_error_names_message_part(decoders: Decoders):
    with pytest.raises(InvalidImage, match="can't be decoded") as caught:
        decoders.image(image_of(SMALL.data[:30], (64, 64)), budget())
    assert caught.value.param == PARAM
    with pytest.raises(InvalidImage, match="size"):
        decoders.image(image_of(SMALL.data, (64, 65)), budget())


def test_decode_budget_limits_pixels_per_request(decoders: Decoders):
    left = budget(max_decoded_pixels=2 * 64 * 64)
    for _ in range(2):
        decoders.image(SMALL, left)
    with pytest.raises(DecodeBudgetExceeded, match="have 12288 pixels to decode") as caught:
        decoders.image(SMALL, left)
    assert (caught.value.param, caught.value.status) == (PARAM, 413)


def test_decode_budget_limits_seconds_per_request(decoders: Decoders):
    """Four megapixels get a twentieth of `decode_seconds`."""
    left, started = budget(decode_timeout_seconds=20.0), time.monotonic()
    with pytest.raises(DecodeBudgetExceeded, match="takes over 1 seconds") as caught:
        decoders.image(SLOW, left)
    assert time.monotonic() - started < 10
    assert caught.value.param == PARAM
    with pytest.raises(DecodeBudgetExceeded):
        decoders.image(SMALL, left)
    assert decoders.image(SMALL, budget()).shape == (64, 64, 3)


def test_image_decoding_stops_on_cancellation(decoders: Decoders):
    cancellation, started = Cancellation(), time.monotonic()
    threading.Timer(0.5, cancellation.cancel).start()
    with pytest.raises(Cancelled):
        decoders.image(SLOW, budget(cancellation))
    assert time.monotonic() - started < 5
    assert decoders.num_tracked == 0


def test_image_of_killed_decoder_is_decoded_by_another():
    """As the kernel kills it when other programs use all memory."""
    pool = Decoders(settings.ImageSettings(), settings.VideoSettings(), 1)
    before, decoder_pids = children_of(os.getpid()), list[int]()

    def kill() -> None:
        while not decoder_pids:
            decoder_pids.extend(set(children_of(os.getpid())) - set(before))
        time.sleep(0.5)
        os.kill(decoder_pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    image = encoded(gradient("RGB", (6000, 4000)), compress_level=1)
    assert pool.image(image, budget()).shape == (4000, 6000, 3)
    killer.join()
    pool.close()


def test_decoder_process_imports_no_heavy_modules():
    """So it starts fast, and takes little memory."""
    program = (
        "import vlm_server.prompt.media.images, vlm_server.prompt.media.process, sys\n"
        "print([name for name in ('numpy', 'mlx', 'av', 'asyncio') if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        env=launch.environment() | {"PYTHONPATH": os.getcwd()},
    )
    assert ended.stdout == b"[]\n"
