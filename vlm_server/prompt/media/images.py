"""Decodes images to upright, opaque RGB."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import ExifTags, ImageMath
from PIL import Image as PillowImage
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from vlm_server.errors import InvalidImage
from vlm_server.prompt.media.jpeg import has_all_blocks
from vlm_server.prompt.media.png import has_all_rows, is_covered, match_depth
from vlm_server.protocol import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, KeyError, zlib.error, struct.error)
"""What Pillow and zlib raise for bytes that are no image."""

PillowImage.MAX_IMAGE_PIXELS = None  # the header was held against limits.max_image_pixels

_UPRIGHT = {
    2: PillowImage.Transpose.FLIP_LEFT_RIGHT,
    3: PillowImage.Transpose.ROTATE_180,
    4: PillowImage.Transpose.FLIP_TOP_BOTTOM,
    5: PillowImage.Transpose.TRANSPOSE,
    6: PillowImage.Transpose.ROTATE_270,
    7: PillowImage.Transpose.TRANSVERSE,
    8: PillowImage.Transpose.ROTATE_90,
}
"""What undoes each EXIF orientation."""


def decode_rgb(image: Image) -> PillowImage.Image:
    """The first frame, upright as its EXIF says, flattened on white, as RGB, no larger than asked.

    Raises InvalidImage if any of it can't be read: an image is never silently left out.
    """
    try:
        with PillowImage.open(io.BytesIO(image.data), formats=FORMATS) as opened:
            if opened.size != (image.width, image.height):
                raise InvalidImage("the picture's size is not what its header said", image.param)
            if isinstance(opened, PngImageFile) and not is_covered(opened):
                raise InvalidImage("the PNG picture has pixels for a part of it", image.param)
            opened.load()
            if isinstance(opened, PngImageFile):
                if not has_all_rows(image.data, opened):
                    raise InvalidImage("the PNG picture ends before its last row", image.param)
                match_depth(image.data, opened)
            if isinstance(opened, JpegImageFile) and not has_all_blocks(image.data, opened):
                raise InvalidImage("the JPEG picture ends before its last block", image.param)
            decoded = _flatten(_upright(opened))
    except InvalidImage:
        raise
    except _UNREADABLE:
        raise InvalidImage(f"the {image.format} picture can't be decoded", image.param) from None
    if image.max_side_pixels is not None:
        decoded = decoded.copy()  # no longer a file, which might be decoded at another size
        decoded.thumbnail((image.max_side_pixels, image.max_side_pixels))
    return decoded


def _upright(image: PillowImage.Image) -> PillowImage.Image:
    """Not `ImageOps.exif_transpose`: it writes the EXIF block anew, and a damaged one fails."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001 - a corrupt EXIF block says nothing about the pixels
        return image
    transposition = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if transposition is None else image.transpose(transposition)


def _flatten(image: PillowImage.Image) -> PillowImage.Image:
    """RGB, with transparency shown on white and 16-bit grey scaled down to 8."""
    if image.mode.startswith("I") or image.mode == "F":
        transparent, deep = image.info.get("transparency"), image.convert("I")
        image = deep.point(lambda value: value / 257 + 0.5).convert("L")
        image.info.pop("transparency", None)
        if isinstance(transparent, int):
            opaque = ImageMath.lambda_eval(lambda args: args["deep"] != transparent, deep=deep)
            image.putalpha(opaque.convert("L").point(lambda value: 255 * value))
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = PillowImage.new("RGBA", rgba.size, "white")
        return PillowImage.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
