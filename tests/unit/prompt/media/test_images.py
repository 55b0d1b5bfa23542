"""Images of every format and mode decode to the right RGB, and broken ones are refused."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PillowImage

from tests.support.image_files import image_of, submitted
from tests.support.images import random_image
from tests.support.whole_run import examples
from vlm_server.api.parsing.media import image_bounds, image_header
from vlm_server.errors import InvalidImage
from vlm_server.prompt.media import png as png_rows
from vlm_server.prompt.media.images import decode_rgb
from vlm_server.protocol import Image

WIDTH, HEIGHT = 48, 32
NEAR = 6
"""The largest mean distance of a lossy image from the original's pixels."""


def pixels(image: Image) -> np.ndarray:
    decoded = decode_rgb(image)
    assert decoded.mode == "RGB"
    return np.asarray(decoded).astype(int)


def rgb(mode: str = "RGB") -> PillowImage.Image:
    return random_image(5, WIDTH, HEIGHT).convert(mode)


def distance(a: np.ndarray, b: PillowImage.Image) -> float:
    return float(np.abs(a - np.asarray(b).astype(int)).mean())


# ---- modes ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA"])
def test_png_modes_decode_to_rgb(mode: str):
    source = rgb(mode)
    assert distance(pixels(submitted(source)), source.convert("RGB")) == 0


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_modes_decode_to_rgb(mode: str):
    assert (
        distance(pixels(submitted(rgb(mode), "JPEG", quality=95)), rgb(mode).convert("RGB")) < NEAR
    )


@pytest.mark.parametrize("name", ["WEBP", "GIF"])
def test_webp_and_gif_decode_to_rgb(name: str):
    options = {"lossless": True} if name == "WEBP" else {}
    assert distance(pixels(submitted(rgb(), name, **options)), rgb()) < NEAR


def test_sixteen_bit_grey_is_scaled_to_eight_bits():
    values = np.linspace(0, 65535, WIDTH * HEIGHT).reshape(HEIGHT, WIDTH).astype(np.uint16)
    found = pixels(submitted(PillowImage.fromarray(values)))
    assert np.abs(found[..., 0] - values / 257).max() <= 0.51
    assert (found.min(), found.max()) == (0, 255)
    assert (found[..., 0] == found[..., 2]).all()


def test_transparent_pixels_become_white():
    source = PillowImage.new("RGBA", (WIDTH, HEIGHT), (255, 0, 0, 0))
    source.paste((0, 0, 255, 255), (0, 0, 10, 10))
    found = pixels(submitted(source))
    assert found[5, 5].tolist() == [0, 0, 255]
    assert found[20, 20].tolist() == [255, 255, 255]


def test_half_transparent_pixels_blend_with_white():
    found = pixels(submitted(PillowImage.new("RGBA", (4, 4), (0, 0, 0, 128))))
    assert abs(int(found[0, 0, 0]) - 127) <= 1


@pytest.mark.parametrize("mode", ["LA", "La", "PA"])
def test_grey_and_palette_alpha_become_white(mode: str):
    source = PillowImage.new("LA", (8, 8), (0, 0))
    source.putpixel((0, 0), (0, 255))
    if mode == "PA":
        source = source.convert("RGBA").convert("PA")
        image = submitted(source.convert("RGBA").quantize(4))
    else:
        image = submitted(source)
    found = pixels(image)
    assert found[0, 0].tolist() == [0, 0, 0]
    assert found[5, 5].tolist() == [255, 255, 255]


def test_pillow_mode_pa_is_flattened_on_white():
    """No supported format decodes to PA, but a plugin may."""
    from vlm_server.prompt.media.images import _flatten

    source = PillowImage.new("RGBA", (2, 1), (0, 255, 0, 0))
    source.putpixel((0, 0), (0, 0, 255, 255))
    flat = _flatten(source.convert("PA"))
    assert flat.mode == "RGB"
    assert flat.getpixel((1, 0)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["P", "L", "1", "RGB"])
def test_png_trns_color_becomes_white(mode: str):
    source = PillowImage.new(mode, (8, 8), 0 if mode != "RGB" else (9, 9, 9))
    if mode == "P":
        source.putpalette([9, 9, 9, 200, 0, 0])
    source.putpixel((0, 0), 1 if mode != "RGB" else (200, 0, 0))
    key: object = (9, 9, 9) if mode == "RGB" else 0
    found = pixels(submitted(source, transparency=key))
    assert found[5, 5].tolist() == [255, 255, 255]
    assert found[0, 0].tolist() != [255, 255, 255] or mode == "1"


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_png_grey_trns_affects_exactly_one_shade(depth: int):
    """An image of all shades, exactly one of which is transparent."""
    count, width = 1 << depth, 1 << min(depth, 8)
    shades = np.arange(count)
    bits = (shades[:, None] >> np.arange(depth)[::-1]) & 1
    rows = np.packbits(bits.astype(bool).reshape(count // width, -1), axis=1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    for key in {0, 1, count // 2 - 1, count - 1}:
        data = png(width, count // width, depth, 0, raw, (b"tRNS", struct.pack(">H", key)))
        found = pixels(image_of(data, "PNG", width, count // width))[..., 0].reshape(-1)
        assert found[key] == 255
        others = shades != key
        assert np.abs(found - shades * 255 / (count - 1))[others].max() <= 0.5


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("width", "transparent"), [(4, 0), (3, 0), (3, 3)])
def test_png_sixteen_bit_trns_affects_exactly_one_color(
    width: int, transparent: int, interlaced: bool
):
    """Only one colour is transparent, not those that differ from it in one byte."""
    colors = [(40000, 1000, 9), (40000, 1001, 9), (16384, 59392, 2304), (40001, 1000, 8)]
    shown, key = colors[:width], (b"tRNS", struct.pack(">3H", *colors[transparent]))
    rows = [struct.pack(">3H", *color) for color in shown]
    # Of the passes over a row of up to four pixels, these are the ones that have any.
    passes = [rows[0:1], rows[2:3], rows[1::2]] if interlaced else [rows]
    raw = b"".join(b"\0" + b"".join(row) for row in passes)
    data = png(width, 1, 16, 2, raw, key, interlaced=interlaced)
    expected = [[value >> 8 for value in color] for color in shown]
    if transparent < width:
        expected[transparent] = [255, 255, 255]
    found = pixels(image_of(data, "PNG", width, 1))
    assert found[0].tolist() == expected


def test_gif_transparency_becomes_white():
    source = PillowImage.new("P", (8, 8), 0)
    source.putpalette([0, 0, 0, 200, 0, 0])
    source.putpixel((0, 0), 1)
    found = pixels(submitted(source, "GIF", transparency=0))
    assert found[5, 5].tolist() == [255, 255, 255]
    assert found[0, 0].tolist() == [200, 0, 0]


# ---- formats of phones and scanners ------------------------------------------------------------


PLAIN_MODES = ("RGB", "RGBA", "L", "1", "P", "CMYK", "I;16", "I;16B")


@pytest.mark.parametrize(
    ("mode", "compression"),
    [
        *itertools.product(PLAIN_MODES, (None, "tiff_lzw", "tiff_deflate")),
        *itertools.product(("RGB", "L", "CMYK"), ("jpeg",)),
        ("1", "group4"),
    ],
)
def test_tiff_modes_and_compressions_decode_to_rgb(mode: str, compression: str | None):
    source = rgb("L" if mode.startswith("I") else mode)
    shown = source.convert("RGB")
    if mode.startswith("I"):
        source = source.convert("I").point(lambda value: value * 257).convert(mode)
    found = pixels(submitted(source, "TIFF", compression=compression))
    assert distance(found, shown) < (2 * NEAR if compression == "jpeg" else 1)


@pytest.mark.parametrize("name", ["BMP", "AVIF", "HEIC"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_bmp_avif_and_heic_decode_to_rgb(name: str, mode: str):
    source = rgb(mode)
    assert distance(pixels(submitted(source, name)), source.convert("RGB")) < 2 * NEAR


@pytest.mark.parametrize("name", ["AVIF", "HEIC", "TIFF"])
def test_avif_heic_and_tiff_transparency_becomes_white(name: str):
    source = PillowImage.new("RGBA", (WIDTH, HEIGHT), (255, 0, 0, 0))
    assert (
        distance(pixels(submitted(source, name)), PillowImage.new("RGB", source.size, "white")) < 2
    )


def test_tiff_decodes_first_page():
    pages = [PillowImage.new("L", (WIDTH, HEIGHT), level) for level in (200, 90)]
    assert set(
        pixels(submitted(pages[0], "TIFF", save_all=True, append_images=pages[1:])).flat
    ) == {200}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_tiff_orientation_is_applied_once(orientation: int):
    stored = as_stored(rgb(), orientation)
    data = submitted(stored, "TIFF", exif=orientation_exif(orientation)).data
    header = image_header.read(data, "p", 1 << 30)
    found = pixels(image_of(data, "TIFF", header.width, header.height))
    assert distance(found, rgb()) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_avif_orientation_follows_its_boxes(orientation: int):
    stored = as_stored(rgb(), orientation)
    image = submitted(stored, "AVIF", exif=orientation_exif(orientation), quality=100)
    assert distance(pixels(image), rgb()) < NEAR


@pytest.mark.parametrize("quarters", range(4))
def test_heic_rotation_follows_its_boxes(quarters: int):
    """Counterclockwise; its header has the size before the rotation, and its EXIF is ignored."""
    source = rgb()
    source.info["exif"] = orientation_exif(6).tobytes()  # makes the box
    data = submitted(source, "HEIC").data
    angle = data.index(b"irot") + 4

    def found(turns: int) -> np.ndarray:
        turned = data[:angle] + bytes([turns]) + data[angle + 1 :]
        header = image_header.read(turned, "p", 1 << 30)
        return pixels(image_of(turned, "HEIC", header.width, header.height))

    assert np.array_equal(found(quarters), np.rot90(found(0), quarters))


@pytest.mark.parametrize("mode", ["F", "I"])
def test_tiff_with_unknown_value_range_is_refused(mode: str):
    with pytest.raises(InvalidImage, match="rare kind"):
        decode_rgb(submitted(rgb("L").convert(mode), "TIFF"))


def test_sixteen_bit_tiff_with_white_at_zero_is_refused():
    """Pillow shows it with black for white."""
    source = rgb("L").convert("I;16")
    with pytest.raises(InvalidImage, match="rare kind"):
        decode_rgb(submitted(source, "TIFF", tiffinfo={262: 0}))


@pytest.mark.parametrize("name", ["AVIF", "HEIC"])
def test_image_larger_than_its_boxes_is_refused(name: str):
    whole = submitted(rgb(), name).data
    with pytest.raises(InvalidImage, match="size"):
        decode_rgb(image_of(whole, name, WIDTH, HEIGHT - 1))


# ---- frames --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG"])
def test_animation_decodes_first_frame(name: str):
    frames = [PillowImage.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if name == "WEBP" else {}
    animation = submitted(frames[0], name, save_all=True, append_images=frames[1:], **options)
    assert distance(pixels(animation), frames[0]) == 0


# ---- EXIF ----------------------------------------------------------------------------


def orientation_exif(value: int) -> PillowImage.Exif:
    exif = PillowImage.Exif()
    exif[0x0112] = value
    return exif


def as_stored(upright: PillowImage.Image, orientation: int) -> PillowImage.Image:
    """The image as a camera stores it, which `orientation` turns upright again."""
    t = PillowImage.Transpose
    inverse = {
        2: t.FLIP_LEFT_RIGHT,
        3: t.ROTATE_180,
        4: t.FLIP_TOP_BOTTOM,
        5: t.TRANSPOSE,
        6: t.ROTATE_90,
        7: t.TRANSVERSE,
        8: t.ROTATE_270,
    }
    return upright.transpose(inverse[orientation]) if orientation in inverse else upright


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int, name: str):
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(name, {})
    stored = as_stored(rgb(), orientation)
    image = submitted(stored, name, exif=orientation_exif(orientation), **options)
    found = pixels(image)
    assert found.shape == (HEIGHT, WIDTH, 3)
    assert distance(found, rgb()) < NEAR


def tiff(*entries: tuple[int, int, int, int], following: int = 0) -> bytes:
    """An EXIF block of one directory: (tag, type, count, value) each."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    directory = struct.pack("<H", len(entries)) + body + struct.pack("<I", following)
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + directory


TURNED = (0x0112, 3, 1, 6)
BROKEN_EXIFS = {
    "cyclic next directory": tiff(TURNED, following=8),
    "cyclic sub-directory": tiff(TURNED, (0x8769, 4, 1, 8)),
    "a value far outside": tiff(TURNED, (0x010F, 2, 1000, 0xFFFFFF00)),
    "an unknown type": tiff(TURNED, (0x010F, 99, 1, 0)),
    "a float of zero by zero": tiff(TURNED, (0x011A, 5, 1, 38)) + b"\0" * 8,
    "a wrong type of a known tag": tiff(TURNED, (0x011A, 2, 4, 0x41414141)),
    "a string where numbers are meant": tiff(TURNED, (0x0132, 3, 2, 0xFFFF)),
    "a huge count": tiff(TURNED, (0x9286, 7, 0xFFFFFFFF, 8)),
    "a GPS directory of numbers": tiff(TURNED, (0x8825, 5, 1, 0)),
    "many of the same": tiff(*[TURNED] * 200),
}


@pytest.mark.parametrize("kind", BROKEN_EXIFS)
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
def test_orientation_in_broken_exif_is_applied(kind: str, name: str):
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(name, {})
    stored = as_stored(rgb(), 6)
    found = pixels(submitted(stored, name, exif=BROKEN_EXIFS[kind], **options))
    assert distance(found, rgb()) < NEAR


@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0", b"Exif\0\0garbage", tiff((0x0112, 3, 1, 99)), tiff((0x0112, 2, 4, 0x41)), b"\0"],
)
def test_unreadable_exif_leaves_image_unrotated(exif: bytes):
    found = pixels(submitted(rgb(), "JPEG", exif=exif, quality=95, subsampling=0))
    assert distance(found, rgb()) < NEAR


# ---- broken images -------------------------------------------------------------------


def noise(width: int = 120, height: int = 90) -> PillowImage.Image:
    values = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PillowImage.fromarray(values)


KINDS = {
    "png": ("PNG", {}),
    "jpeg": ("JPEG", {"quality": 90}),
    "progressive": ("JPEG", {"quality": 90, "progressive": True}),
    "webp": ("WEBP", {"lossless": True}),
    "lossy webp": ("WEBP", {"quality": 80}),
    "gif": ("GIF", {}),
    "interlaced gif": ("GIF", {"interlace": True}),
    "tiff": ("TIFF", {}),
    "packed tiff": ("TIFF", {"compression": "tiff_lzw"}),
    "bmp": ("BMP", {}),
    "avif": ("AVIF", {}),
    "heic": ("HEIC", {}),
}


@pytest.mark.parametrize("eighth", range(1, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_truncated_image_is_refused(kind: str, eighth: int):
    name, options = KINDS[kind]
    whole = submitted(noise(), name, **options)
    part = image_of(whole.data[: len(whole.data) * eighth // 8], name, 120, 90)
    with pytest.raises(InvalidImage) as caught:
        decode_rgb(part)
    assert caught.value.param == "messages[0]"


JPEGS: dict[str, dict[str, object]] = {
    "plain": {},
    "fine": {"quality": 95, "subsampling": 0},
    "progressive": {"progressive": True},
    "with restarts": {"restart_marker_rows": 1},
}


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("kind", JPEGS)
def test_jpeg_cut_before_end_marker_is_refused(kind: str, mode: str):
    whole = submitted(noise().convert(mode), "JPEG", **JPEGS[kind]).data
    headers = whole.index(b"\xff\xda") + 14
    for share in (0.0, 0.3, 0.6, 0.9):
        length = headers + int(share * (len(whole) - headers))
        with pytest.raises(InvalidImage, match=r"last block|decoded"):
            decode_rgb(image_of(whole[:length] + b"\xff\xd9", "JPEG", 120, 90))


def scan_ends(jpeg: bytes) -> list[int]:
    """The end of each scan's compressed data."""
    ends = []
    for scan in re.finditer(rb"\xff\xda", jpeg):
        ending = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]").search(jpeg, scan.end())
        assert ending is not None
        ends.append(ending.start())
    return ends


def scan_for_each_component(image: PillowImage.Image, **options: object) -> bytes:
    """A baseline JPEG whose Y, Cb and Cr come one after the other."""
    planes = [submitted(band, "JPEG", **options).data for band in image.convert("YCbCr").split()]
    frame = planes[0].index(b"\xff\xc0")
    head = planes[0][planes[0].index(b"\xff\xdb") : frame]  # no JFIF
    frame_header = planes[0][frame + 4 : frame + 9] + bytes((3, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0))
    parts = [b"\xff\xd8", head, b"\xff\xc0", struct.pack(">H", 17), frame_header]
    parts.append(planes[0][frame + 13 : planes[0].index(b"\xff\xda")])
    for number, plane in enumerate(planes, 1):
        scan_header = struct.pack(">HBBBBBB", 8, 1, number, 0, 0, 63, 0)
        parts += [b"\xff\xda", scan_header, plane[plane.index(b"\xff\xda") + 10 : -2]]
    return b"".join(parts) + b"\xff\xd9"


SCANS = {
    "progressive": lambda: submitted(noise(), "JPEG", progressive=True).data,
    "a scan for each component": lambda: scan_for_each_component(noise()),
}


@pytest.mark.parametrize("kind", SCANS)
def test_jpeg_without_last_scans_is_refused(kind: str):
    whole = SCANS[kind]()
    *ends, _ = scan_ends(whole)
    assert len(ends) >= 2
    assert distance(pixels(image_of(whole, "JPEG", 120, 90)), noise()) < 60
    for end in ends:
        with pytest.raises(InvalidImage, match="last block"):
            decode_rgb(image_of(whole[:end] + b"\xff\xd9", "JPEG", 120, 90))


@pytest.mark.parametrize("kind", SCANS)
def test_jpeg_with_incomplete_scan_is_refused(kind: str):
    whole = SCANS[kind]()
    for start, end in itertools.pairwise((whole.index(b"\xff\xda"), *scan_ends(whole))):
        cut = whole[: (start + end) // 2].rstrip(b"\xff")
        for rest in (whole[end:], b"\xff\xd9"):
            with pytest.raises(InvalidImage, match="last block"):
                decode_rgb(image_of(cut + rest, "JPEG", 120, 90))


BEHIND = {
    "an end": b"more\xff\xd9",
    "a picture": submitted(random_image(1, 40, 30), "JPEG").data,
    "a progressive picture": submitted(random_image(1, 40, 30), "JPEG", progressive=True).data,
    "fill": b"\xff" * (64 << 10),
}
CUT = {
    "no end": b"",
    "its end": b"\xff\xd9",
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("kind", [*JPEGS, "a scan for each component"])
def test_bytes_after_jpeg_do_not_affect_completeness(kind: str, behind: str):
    """Such as the second image of an MPO or Ultra HDR file."""
    scans = scan_for_each_component(noise())
    whole = submitted(noise(), "JPEG", **JPEGS[kind]).data if kind in JPEGS else scans
    image_bounds.check(whole + BEHIND[behind])
    shown = decode_rgb(image_of(whole + BEHIND[behind], "JPEG", 120, 90))
    assert shown.tobytes() == decode_rgb(image_of(whole, "JPEG", 120, 90)).tobytes()
    headers = whole.index(b"\xff\xda") + 14
    for share, end in itertools.product((0.3, 0.6, 0.9), CUT.values()):
        cut = whole[: headers + int(share * (len(whole) - headers))].rstrip(b"\xff")
        with pytest.raises(InvalidImage, match=r"last block|decoded"):
            decode_rgb(image_of(cut + end + BEHIND[behind], "JPEG", 120, 90))


def test_mpo_with_truncated_first_image_is_refused():
    whole = submitted(noise(), "MPO", save_all=True, append_images=[noise()]).data
    second = whole.index(b"\xff\xd9\xff\xd8") + 2
    assert pixels(image_of(whole, "JPEG", 120, 90)).shape == (90, 120, 3)
    for end in CUT.values():
        with pytest.raises(InvalidImage, match=r"last block|decoded"):
            decode_rgb(image_of(whole[: second // 2] + end + whole[second:], "JPEG", 120, 90))


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_cut_at_restart_marker_is_refused(progressive: bool):
    whole = submitted(noise(), "JPEG", restart_marker_rows=1, progressive=progressive).data
    restarts = [found.start() for found in re.finditer(rb"\xff[\xd0-\xd7]", whole)]
    assert len(restarts) >= 5
    for restart in restarts:
        with pytest.raises(InvalidImage, match="last block"):
            decode_rgb(image_of(whole[:restart] + b"\xff\xd9", "JPEG", 120, 90))


@pytest.mark.parametrize("colour", ["red", (200, 30, 90), "white"])
def test_jpeg_missing_subsampled_last_row_is_refused(colour: object):
    """Only one row of its last blocks is visible, and colours are stored at half the size."""
    whole = submitted(PillowImage.new("RGB", (160, 65), colour), "JPEG").data
    assert pixels(image_of(whole, "JPEG", 160, 65)).shape == (65, 160, 3)
    for missing in range(12, 80, 4):
        cut = whole[:-missing].rstrip(b"\xff")
        with pytest.raises(InvalidImage, match="last block"):
            decode_rgb(image_of(cut + b"\xff\xd9", "JPEG", 160, 65))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("kind", JPEGS)
def test_uniform_grey_jpeg_is_accepted_as_complete(kind: str, mode: str):
    """Also with something after its end."""
    grey = PillowImage.new("L", (120, 90), 128).convert(mode)
    whole = submitted(grey, "JPEG", **JPEGS[kind]).data
    for data in (whole, whole + b"more", whole + whole):
        assert set(pixels(image_of(data, "JPEG", 120, 90)).flat) <= {127, 128, 129}


@pytest.mark.parametrize("eighth", range(1, 8))
def test_truncated_interlaced_png_is_refused(eighth: int):
    data = adam7_png()
    assert pixels(image_of(data, "PNG", 64, 64)).shape == (64, 64, 3)
    with pytest.raises(InvalidImage):
        decode_rgb(image_of(data[: len(data) * eighth // 8], "PNG", 64, 64))


@pytest.mark.parametrize(("width", "height"), [(121, 90), (120, 91), (90, 120), (1, 1)])
def test_image_size_unlike_header_is_refused(width: int, height: int):
    whole = submitted(noise())
    with pytest.raises(InvalidImage, match="size"):
        decode_rgb(image_of(whole.data, "PNG", width, height))


@pytest.mark.parametrize("name", ["ICO", "PPM", "TGA", "PDF", "EPS", "JPEG2000"])
def test_unsupported_format_declared_as_png_is_refused(name: str):
    buffer = io.BytesIO()
    try:
        noise(16, 16).save(buffer, name)
    except (OSError, KeyError):
        pytest.skip(f"this Pillow can't write {name}")
    with pytest.raises(InvalidImage):
        decode_rgb(image_of(buffer.getvalue(), "PNG", 16, 16))


@pytest.mark.parametrize("data", [b"", b"\0", b"GIF89a", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP"])
def test_tiny_fragment_of_image_is_refused(data: bytes):
    with pytest.raises(InvalidImage):
        decode_rgb(image_of(data, "PNG", 8, 8))


@given(
    kind=st.sampled_from(sorted(KINDS)),
    places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6),
)
@settings(max_examples=examples(150))
def test_mutated_image_decodes_within_size_or_is_refused(
    kind: str, places: list[tuple[float, int]]
):
    name, options = KINDS[kind]
    data = bytearray(submitted(noise(24, 18), name, **options).data)
    for place, value in places:
        data[int(place * (len(data) - 1))] = value
    try:
        decoded = decode_rgb(image_of(bytes(data), name, 24, 18))
    except InvalidImage:
        return
    assert decoded.mode == "RGB"
    assert decoded.width * decoded.height <= 24 * 18
    if name not in ("HEIC", "AVIF"):  # in which damage may cut, too
        assert decoded.size in {(24, 18), (18, 24)}


@pytest.mark.parametrize("chunk", ["zTXt", "iTXt", "iCCP"])
def test_png_text_chunk_bomb_is_refused_or_ignored(chunk: str):
    bomb = zlib.compress(b"x" * (80 << 20), 9)
    body = {
        "zTXt": b"key\0\0" + bomb,
        "iTXt": b"key\0\1\0\0\0" + bomb,
        "iCCP": b"name\0\0" + bomb,
    }[chunk]
    raw = b"".join(b"\0" + b"\x40" * 24 for _ in range(8))
    data = png(8, 8, 8, 2, raw, (chunk.encode(), body))
    with contextlib.suppress(InvalidImage):
        assert pixels(image_of(data, "PNG", 8, 8)).shape == (8, 8, 3)


def png(
    width: int,
    height: int,
    bits: int,
    colour: int,
    raw: bytes,
    *chunks: tuple[bytes, bytes],
    interlaced: bool = False,
) -> bytes:
    """A PNG file of filtered rows, with further chunks before its data."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    return _png_of((b"IHDR", header), *chunks, (b"IDAT", zlib.compress(raw)), (b"IEND", b""))


def adam7_png() -> bytes:
    """A grey interlaced PNG of noise, 64 by 64, which Pillow reads but does not write."""
    values = np.random.default_rng(4).integers(0, 256, (64, 64), dtype=np.uint8)
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4)]
    passes += [(1, 0, 2, 2), (0, 1, 1, 2)]
    raw = b"".join(b"\0" + row.tobytes() for x, y, dx, dy in passes for row in values[y::dy, x::dx])
    header = struct.pack(">IIBBBBB", 64, 64, 8, 0, 0, 0, 1)
    return _png_of((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))


def _png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


@pytest.mark.parametrize(
    ("size", "shown"), [((1200, 300), (512, 128)), ((300, 1200), (128, 512)), ((90, 60), (90, 60))]
)
def test_decoded_image_respects_max_side_pixels(size: tuple[int, int], shown: tuple[int, int]):
    buffer = io.BytesIO()
    PillowImage.new("RGB", size, "red").save(buffer, "PNG")
    image = Image(buffer.getvalue(), "", "PNG", *size, "messages[0]", max_side_pixels=512)
    assert decode_rgb(image).size == shown


def png_of_rows(mode: str, size: tuple[int, int], rows: float, value: int = 1) -> Image:
    """A PNG whose compressed data are whole and end after `rows` rows."""
    buffer = io.BytesIO()
    PillowImage.new(mode, size, value).save(buffer, "PNG")
    whole = buffer.getvalue()
    start = whole.index(b"IDAT") - 4
    (length,) = struct.unpack_from(">I", whole, start)
    inflated = zlib.decompress(whole[start + 8 : start + 8 + length])
    body = zlib.compress(inflated[: int(len(inflated) * rows / size[1])])
    checksum = zlib.crc32(b"IDAT" + body)
    chunk = struct.pack(">I", len(body)) + b"IDAT" + body + struct.pack(">I", checksum)
    return image_of(whole[:start] + chunk + whole[start + 12 + length :], "PNG", *size)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
@pytest.mark.parametrize("value", [0, 1, 255])
def test_png_ending_before_last_row_is_refused(mode: str, value: int):
    for rows in (0, 1, 18.5, 19, 19.9):
        assert decode_rgb(png_of_rows(mode, (37, 20), 20, value)).size == (37, 20)
        with pytest.raises(InvalidImage, match=r"last row|decoded"):
            decode_rgb(png_of_rows(mode, (37, 20), rows, value))


def test_png_with_visible_last_row_is_inflated_once(monkeypatch: pytest.MonkeyPatch):
    def fail(_: bytes) -> bool:
        raise AssertionError("inflated again")

    monkeypatch.setattr(png_rows, "_counts_all_rows", fail)
    assert decode_rgb(submitted(noise())).size == (120, 90)
    with pytest.raises(AssertionError):
        decode_rgb(image_of(adam7_png(), "PNG", 64, 64))


def test_animated_png_rows_are_counted(monkeypatch: pytest.MonkeyPatch):
    buffer, counted = io.BytesIO(), list[bytes]()
    noise().save(buffer, "PNG", save_all=True, append_images=[noise().rotate(180)])
    monkeypatch.setattr(png_rows, "_counts_all_rows", lambda data: not counted.append(data))
    assert decode_rgb(image_of(buffer.getvalue(), "PNG", 120, 90)).size == (120, 90)
    assert counted == [buffer.getvalue()]


FRAME = struct.pack(">IIIIIHHBB", 0, 8, 1, 0, 7, 1, 10, 0, 0)
"""An APNG frame that covers the last of eight rows."""


@pytest.mark.parametrize(
    "chunks",
    [[(b"fcTL", FRAME)], [(b"acTL", struct.pack(">II", 1, 0)), (b"fcTL", FRAME)]],
    ids=["frame-without-animation", "animation-of-one-frame"],
)
@pytest.mark.parametrize("rows", [1, 8])
def test_png_with_data_of_partial_frame_is_refused(chunks: list[tuple[bytes, bytes]], rows: int):
    row = b"\0" + b"\xc8" * 24
    assert decode_rgb(image_of(png(8, 8, 8, 2, row * 8), "PNG", 8, 8)).size == (8, 8)
    with pytest.raises(InvalidImage, match="a part"):
        decode_rgb(image_of(png(8, 8, 8, 2, row * rows, *chunks), "PNG", 8, 8))


@pytest.mark.parametrize("num_passes", range(1, 7))
def test_png_with_late_interlace_header_is_refused(num_passes: int):
    header = struct.pack(">IIBBBBB", 9, 9, 8, 0, 0, 0, 1)
    passes = list(png_rows._passes(9, 9, True))[:num_passes]
    raw = b"".join((b"\0" + b"\xc8" * columns) * rows for columns, rows in passes)
    with pytest.raises(InvalidImage):
        decode_rgb(image_of(png(9, 9, 8, 0, raw, (b"IHDR", header)), "PNG", 9, 9))


@pytest.mark.parametrize(("size", "sizes"), [((1, 1), 1), ((5, 3), 6), ((8, 8), 7), ((37, 20), 7)])
def test_interlaced_png_passes_cover_each_pixel_once(size: tuple[int, int], sizes: int):
    passes = [
        (columns, rows) for columns, rows in png_rows._passes(*size, True) if columns and rows
    ]
    assert len(passes) == sizes
    assert sum(columns * rows for columns, rows in passes) == size[0] * size[1]
