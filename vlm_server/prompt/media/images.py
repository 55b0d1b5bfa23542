"""The decoding of images to upright, opaque RGB, in a process that can be killed."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import msgspec
from PIL import AvifImagePlugin, ExifTags, ImageMath
from PIL import Image as PillowImage
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION, TiffImageFile

from vlm_server.errors import InvalidImage
from vlm_server.platform.child.messages import Parts
from vlm_server.prompt.media.jpeg import has_all_blocks
from vlm_server.prompt.media.messages import Frames, pack
from vlm_server.prompt.media.png import has_all_rows, is_covered, match_depth
from vlm_server.protocol import Image

_HEIC = "HEIC"
_TRANSFORMED = (_HEIC, "AVIF")
"""Formats whose header has the size before cropping and rotation."""
_WHITE_IS_ZERO = 0
_DECODER_THREADS = 2
AvifImagePlugin.DEFAULT_MAX_THREADS = _DECODER_THREADS
_UNREADABLE = (
    OSError, ValueError, SyntaxError, EOFError, KeyError, RuntimeError, zlib.error, struct.error,
)  # fmt: skip
"""Exceptions of Pillow, its decoders and zlib for bytes that are no image."""

PillowImage.MAX_IMAGE_PIXELS = None  # the header was checked against limits.max_image_pixels

_BAND_PIXELS = 1 << 18
_UPRIGHT = {
    2: PillowImage.Transpose.FLIP_LEFT_RIGHT,
    3: PillowImage.Transpose.ROTATE_180,
    4: PillowImage.Transpose.FLIP_TOP_BOTTOM,
    5: PillowImage.Transpose.TRANSPOSE,
    6: PillowImage.Transpose.ROTATE_270,
    7: PillowImage.Transpose.TRANSVERSE,
    8: PillowImage.Transpose.ROTATE_90,
}
"""The inverse of each EXIF orientation."""


def decode_job(job: bytearray) -> Parts:
    """The answer to a job of the process that decodes images. Raises InvalidImage."""
    try:
        decoded = decode_rgb(msgspec.msgpack.decode(job, type=Image))
    except MemoryError:
        raise InvalidImage("decoding the image takes too much memory") from None
    return pack(Frames(decoded.width, decoded.height), _bands(decoded))


def _bands(image: PillowImage.Image) -> Iterator[bytes]:
    """The pixels of `image`, some rows at a time, so that they are never copied as a whole."""
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        yield image.crop((0, top, image.width, bottom)).tobytes()


def decode_rgb(image: Image) -> PillowImage.Image:
    """The first frame, upright as its EXIF says, on white, as RGB, no larger than asked.

    Raises InvalidImage if a part can't be read.
    """
    try:
        with _open(image) as opened:
            _check_size(opened, image)
            if isinstance(opened, PngImageFile) and not is_covered(opened):
                raise InvalidImage("the PNG image has pixels for a part of it", image.param)
            if isinstance(opened, TiffImageFile) and not _has_known_range(opened):
                raise InvalidImage("the TIFF image's pixels are of a rare kind", image.param)
            opened.load()
            _check_size(opened, image)  # HEIC readers replace the header's size
            if isinstance(opened, PngImageFile):
                if not has_all_rows(image.data, opened):
                    raise InvalidImage("the PNG image ends before its last row", image.param)
                match_depth(image.data, opened)
            if isinstance(opened, JpegImageFile) and not has_all_blocks(image.data, opened):
                raise InvalidImage("the JPEG image ends before its last block", image.param)
            decoded = _flatten(_upright(opened))
    except InvalidImage:
        raise
    except _UNREADABLE:
        raise InvalidImage(f"the {image.format} image can't be decoded", image.param) from None
    if image.max_side_pixels is not None:
        decoded = decoded.copy()  # detached from the file, which might be decoded at another size
        decoded.thumbnail((image.max_side_pixels, image.max_side_pixels))
    return decoded


def _open(image: Image) -> PillowImage.Image:
    """The image, opened by the reader of its format only."""
    data = io.BytesIO(image.data)
    if image.format != _HEIC:
        return PillowImage.open(data, formats=(image.format,))
    import pillow_heif  # from an extra

    pillow_heif.options.DECODE_THREADS = _DECODER_THREADS
    opened: PillowImage.Image = pillow_heif.HeifImageFile(data)
    return opened


def _check_size(opened: PillowImage.Image, image: Image) -> None:
    """Raises InvalidImage unless the image has the size in its header, which the budget used."""
    if image.format in _TRANSFORMED:
        is_planned = opened.width * opened.height <= image.width * image.height
    else:
        is_planned = opened.size == (image.width, image.height)
    if not is_planned:
        raise InvalidImage("the image's size is not what its header said", image.param)


def _upright(image: PillowImage.Image) -> PillowImage.Image:
    """`image` turned as its EXIF says. `ImageOps.exif_transpose` would fail on damaged EXIF."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001 - a corrupt EXIF block says nothing about the pixels
        return image
    transposition = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if transposition is None else image.transpose(transposition)


def _has_known_range(opened: TiffImageFile) -> bool:
    """Whether the pixels are 8 or 16 bits deep, with black at 0 where Pillow expects it."""
    if opened.mode.startswith("I;16"):
        return opened.tag_v2.get(PHOTOMETRIC_INTERPRETATION) != _WHITE_IS_ZERO
    return opened.mode not in ("I", "F")


def _flatten(image: PillowImage.Image) -> PillowImage.Image:
    """`image` as RGB, on white where it is transparent; 16-bit grey is scaled down to 8."""
    if image.mode.startswith("I") or image.mode == "F":
        transparent, deep = image.info.get("transparency"), image.convert("I")
        image = deep.point(lambda value: value / 257 + 0.5).convert("L")
        image.info.pop("transparency", None)
        if isinstance(transparent, int):
            opaque = ImageMath.lambda_eval(lambda args: args["deep"] != transparent, deep=deep)
            image.putalpha(opaque.convert("L").point(lambda value: 255 * value))
    if "a" in image.getbands():  # premultiplied
        image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = PillowImage.new("RGBA", rgba.size, "white")
        return PillowImage.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
