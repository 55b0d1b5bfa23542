"""Documents as request parsing makes them, and what their pages show."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

from vlm_server.api.http.documents.drawing import Documents
from vlm_server.api.parsing.media.documents import Document, PageImage, PageOptions, read_header
from vlm_server.api.parsing.media.external import MediaUrl
from vlm_server.settings import DocumentSettings, Limits, Server, Settings

SOURCE = MediaUrl("", "messages[0].content[1]", "document", 1 << 30)


def document(data: bytes, **options: Any) -> Document:
    return read_header(data, SOURCE, PageOptions(**options))


def documents(limits: Limits | None = None, keys: Sequence[str] = (), **settings: Any) -> Documents:
    document = DocumentSettings(**settings)
    server = Server(api_keys=tuple(keys))
    return Documents(Settings(limits=limits or Limits(), document=document, server=server))


async def pages_of(
    data: bytes,
    drawing: Documents | None = None,
    salt: str = "",
    owner: str = "",
    **options: Any,
) -> tuple[PageImage, ...]:
    """The drawn pages of a document."""
    asked = document(data, **options)
    drawing = drawing or documents()
    return (await drawing.draw([asked], owner, salt, lambda _: None))[asked.key].images


def pixels(page: PageImage) -> Image.Image:
    image = Image.open(io.BytesIO(page.png))
    assert image.size == (page.width, page.height)
    assert image.mode == "RGB"
    return image


def tiff(*pages: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    pages[0].save(file, "TIFF", save_all=True, append_images=pages[1:], **options)
    return file.getvalue()
