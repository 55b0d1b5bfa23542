"""PDFs and TIFFs, page by page, as pixels. Runs in a process that can be killed."""

from __future__ import annotations

import io
import math
from contextlib import suppress
from typing import Protocol

import pypdfium2
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from vlm_server.api.http.documents.messages import PageSize
from vlm_server.api.http.documents.text_layer import page_text
from vlm_server.api.parsing.media import image_bounds
from vlm_server.api.parsing.media.documents import Document

_POINTS = 72.0
"""Points per inch: the unit of a PDF."""
_MAX_POINTS = 1_000_000.0
_MAX_CHARACTERS = 300_000
"""The most characters that are put in order. A dense page of a newspaper has 30,000."""
_MIN_DPI, _MAX_DPI = 50.0, 2400.0
"""Resolutions that a TIFF may have; another is none, and its pages are drawn as they are."""
_ENCRYPTED = 4
"""PDFium's FPDF_ERR_PASSWORD."""
_UNSUPPORTED_SECURITY = 5
"""PDFium's FPDF_ERR_SECURITY."""


class DocumentError(Exception):
    """The document, or a page, can't be read; the message is for the client."""


class PageReader(Protocol):
    """A document's pages. Numbers start at 1. Its methods raise DocumentError."""

    def num_pages(self) -> int: ...

    def draw(self, number: int, size: PageSize) -> Image.Image:
        """The page in RGB."""
        ...

    def text(self, number: int) -> str:
        """Its text layer; empty without one."""
        ...


def open_document(document: Document, max_pixels: int) -> PageReader:
    """The reader of `document`; no page of a TIFF may have more than `max_pixels`.

    Raises DocumentError.
    """
    if document.format == "PDF":
        return PdfReader(document.data)
    return TiffReader(document.data, max_pixels)


class PdfReader:
    """A PDF, with its annotations and filled forms. No script of it runs: PDFium has none here."""

    def __init__(self, data: bytes) -> None:
        try:
            self._pdf = pypdfium2.PdfDocument(data)
            self._pdf.init_forms()
        except pypdfium2.PdfiumError as error:
            raise DocumentError(_why_closed(error.err_code)) from None

    def num_pages(self) -> int:
        return len(self._pdf)

    def draw(self, number: int, size: PageSize) -> Image.Image:
        page = self._page(number)
        try:
            width, height = page.get_size()
            scale = _scale(number, width, height, size)
            # Opaque pixels, whatever the page's own format is.
            bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=True)
            image: Image.Image = bitmap.to_pil()
            return image.convert("RGB")
        except pypdfium2.PdfiumError:
            raise DocumentError(f"Page {number} of the document can't be drawn.") from None
        finally:
            page.close()

    def text(self, number: int) -> str:
        page = self._page(number)
        try:
            text_page = page.get_textpage()
            if text_page.count_chars() > _MAX_CHARACTERS:
                raise DocumentError(
                    f"The text of page {number} has more than {_MAX_CHARACTERS} characters: leave "
                    "out `include_text`."
                )
            text = page_text(page, text_page)
        except pypdfium2.PdfiumError:
            raise DocumentError(f"The text of page {number} can't be read.") from None
        finally:
            page.close()
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore")

    def _page(self, number: int) -> pypdfium2.PdfPage:
        try:
            return self._pdf[number - 1]
        except pypdfium2.PdfiumError:
            raise DocumentError(
                f"Page {number} of the document is broken or missing: leave it out with `pages`."
            ) from None


class TiffReader:
    """A TIFF with one or more pages, which have no text layer."""

    def __init__(self, data: bytes, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        try:
            image_bounds.check(data)
            image = Image.open(io.BytesIO(data), formats=["TIFF"])
        except Exception:  # noqa: BLE001  Pillow's parsers raise almost anything on hostile bytes
            raise DocumentError("The TIFF is damaged, or of a kind that can't be read.") from None
        assert isinstance(image, TiffImageFile)
        self._image = image

    def num_pages(self) -> int:
        try:
            return self._image.n_frames
        except Exception:  # noqa: BLE001
            raise DocumentError("The TIFF's list of pages is damaged.") from None

    def draw(self, number: int, size: PageSize) -> Image.Image:
        image = self._image
        try:
            image.seek(number - 1)
            if image.width * image.height > self._max_pixels:
                raise DocumentError(
                    f"Page {number} of the TIFF has more than {self._max_pixels} pixels "
                    "(limits.max_image_pixels)."
                )
            target = _tiff_size(image, size)
            pixels = _to_rgb(image, number)
            return pixels if pixels.size == target else pixels.resize(target)
        except DocumentError:
            raise
        except Exception:  # noqa: BLE001
            raise DocumentError(f"Page {number} of the TIFF can't be read.") from None

    def text(self, number: int) -> str:
        return ""


def _scale(number: int, width: float, height: float, size: PageSize) -> float:
    """Pixels per point of a page with these sides in points. Raises DocumentError."""
    if not (0 < width <= _MAX_POINTS and 0 < height <= _MAX_POINTS):
        raise DocumentError(f"Page {number} of the document has an impossible size.")
    scale = min(size.dpi / _POINTS, math.sqrt(size.max_pixels / (width * height)))
    while math.ceil(width * scale) * math.ceil(height * scale) > size.max_pixels:
        scale *= 0.99  # sides are rounded up, and one of less than a pixel is one
    return scale


def _tiff_size(image: TiffImageFile, size: PageSize) -> tuple[int, int]:
    """Width and height to draw a page at: never more across than it has, with square pixels."""
    x_dpi = y_dpi = size.dpi
    with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
        given = tuple(map(float, image.info["dpi"]))
        if all(_MIN_DPI <= dpi <= _MAX_DPI for dpi in given):
            x_dpi, y_dpi = given
    width, height = image.width, image.height * x_dpi / y_dpi
    ratio = min(1.0, size.dpi / x_dpi, math.sqrt(size.max_pixels / (width * height)))
    return max(1, int(width * ratio)), max(1, int(height * ratio))


def _to_rgb(image: Image.Image, number: int) -> Image.Image:
    """The pixels on white. Raises DocumentError for samples of more than 8 bits."""
    if image.mode[0] in "IF":
        raise DocumentError(
            f"Page {number} of the TIFF has samples of more than 8 bits: send it with 8."
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    pixels = image.convert("RGBA")
    white = Image.new("RGB", pixels.size, "white")
    white.paste(pixels, mask=pixels.getchannel("A"))
    return white


def _why_closed(code: int | None) -> str:
    if code == _ENCRYPTED:
        return "The PDF is encrypted with a password: send it without."
    if code == _UNSUPPORTED_SECURITY:
        return "The PDF is encrypted in a way that can't be read: send it without."
    return "The PDF can't be read: it is damaged, or cut off."
