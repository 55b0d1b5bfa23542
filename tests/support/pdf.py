"""PDFs written by hand: pages with texts and lines, and files that are broken on purpose."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

A4 = (595.0, 842.0)


@dataclass(slots=True)
class Page:
    """A page of `size` points; `content` is in the operators of a PDF."""

    size: tuple[float, float] = A4
    content: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, points: float, text: str) -> Page:
        """Write `text` with its baseline's start at (x, y), counted from the lower left."""
        escaped = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
        self.content.append(f"BT /F1 {points} Tf {x} {y} Td ({escaped}) Tj ET")
        return self

    def line(self, x0: float, y0: float, x1: float, y1: float, width: float = 2) -> Page:
        self.content.append(f"{width} w {x0} {y0} m {x1} {y1} l S")
        return self

    def rectangle(self, x: float, y: float, width: float, height: float, rgb: str) -> Page:
        """Fill a rectangle with a color: three numbers from 0 to 1."""
        self.content.append(f"{rgb} rg {x} {y} {width} {height} re f 0 0 0 rg")
        return self


def write(pages: Sequence[Page]) -> bytes:
    """A PDF with `pages`."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica-Bold >>",
    ]
    for number, page in enumerate(pages):
        width, height = page.size
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width} {height}] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * number} 0 R >>".encode()
        )
        objects.append(stream("\n".join(page.content).encode()))
    return assemble(objects)


def stream(content: bytes, entries: str = "") -> bytes:
    """A stream object."""
    packed = zlib.compress(content)
    head = f"<< /Length {len(packed)} /Filter /FlateDecode {entries} >>"
    return head.encode() + b"\nstream\n" + packed + b"\nendstream"


def assemble(objects: Sequence[bytes], trailer: str = "") -> bytes:
    """A PDF of `objects`, numbered from 1; the first is the catalog."""
    data, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = f"<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>"
    return bytes(data + b"trailer\n%s\nstartxref\n%d\n%%%%EOF\n" % (head.encode(), start))


def data_url(data: bytes) -> str:
    return f"data:application/pdf;base64,{base64.b64encode(data).decode()}"


def numbered(num_pages: int, changed: int = 0) -> bytes:
    """A PDF whose pages show their numbers; page `changed` shows another word."""
    return write(
        [
            Page((300, 300)).text(40, 140, 60, "NEW" if number == changed else f"{number * 7}")
            for number in range(1, num_pages + 1)
        ]
    )


# ---- files that are made to break readers --------------------------------------------------


def encrypted() -> bytes:
    """A PDF that no empty password opens."""
    keys = f"<{'41' * 32}>"
    handler = f"/Filter /Standard /V 1 /R 2 /P -4 /O {keys} /U {keys}"
    return assemble(_one_page(b"0 0 m"), f"/Encrypt << {handler} >> /ID [{keys} {keys}]")


def bomb(num_bytes: int) -> bytes:
    """A PDF of a few kB, whose page has `num_bytes` of operators: compressed twice."""
    packer, content = zlib.compressobj(9), bytearray()
    for _ in range(num_bytes >> 20):
        content += packer.compress(b"0 0 m\n" * ((1 << 20) // 6))
    packed = zlib.compress(bytes(content + packer.flush()), 9)
    head = f"<< /Length {len(packed)} /Filter [/FlateDecode /FlateDecode] >>"
    return assemble(_objects(head.encode() + b"\nstream\n" + packed + b"\nendstream"))


def picture_bomb(side: int) -> bytes:
    """A page with a picture of side² pixels, nearly all of which its data lack."""
    entries = (
        f"/Type /XObject /Subtype /Image /Width {side} /Height {side} /ColorSpace /DeviceRGB "
        "/BitsPerComponent 8"
    )
    picture = stream(bytes(1 << 20), entries)
    return assemble([*_one_page(b"200 0 0 200 0 0 cm /X Do", "/XObject << /X 5 0 R >>"), picture])


def nested_forms(depth: int, width: int) -> bytes:
    """A page whose form draws another one `width` times, and so on: width ** depth drawings."""
    first = 5
    forms = []
    for level in range(depth):
        draw = b"/F Do " * width if level + 1 < depth else b"0 0 9 9 re f "
        inner = f"/Resources << /XObject << /F {first + level + 1} 0 R >> >>"
        entries = f"/Type /XObject /Subtype /Form /BBox [0 0 99 99] {inner}"
        forms.append(stream(draw, entries))
    return assemble([*_one_page(b"/F Do", f"/XObject << /F {first} 0 R >>"), *forms])


def looping_form() -> bytes:
    """A page whose form draws itself."""
    entries = (
        "/Type /XObject /Subtype /Form /BBox [0 0 99 99] /Resources << /XObject << /F 5 0 R >> >>"
    )
    page = _one_page(b"/F Do", "/XObject << /F 5 0 R >>")
    return assemble([*page, stream(b"/F Do /F Do", entries)])


def tiny_tiles() -> bytes:
    """A page that is filled with a pattern of tiles of a millionth of a point."""
    entries = (
        "/Type /Pattern /PatternType 1 /PaintType 1 /TilingType 1 /BBox [0 0 1 1] /XStep 0.000001 "
        "/YStep 0.000001 /Resources << >>"
    )
    page = _one_page(b"/Pattern cs /P scn 0 0 200 200 re f", "/Pattern << /P 5 0 R >>")
    return assemble([*page, stream(b"0 0 1 1 re f", entries)])


def looping_pages() -> bytes:
    """A PDF whose tree of pages is its own child, and says that it has very many."""
    return assemble(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Parent 2 0 R /Count 2147483647 >>",
        ]
    )


def _objects(content: bytes, resources: str = "") -> list[bytes]:
    return [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R "
        f"/Resources << {resources} >> >>".encode(),
        content,
    ]


def _one_page(operators: bytes, resources: str = "") -> list[bytes]:
    return _objects(stream(operators), resources)
