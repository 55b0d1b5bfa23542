"""The form of an upload: the same in pieces as whole, and cheap whatever it holds."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from vlm_server.api.dialects.files.form import UploadForm
from vlm_server.api.files.upload import Upload

TYPE = "multipart/form-data; boundary=b"
TRICKY = b"\r\n--b\t\t-\r\n--b" + b" " * 65 + b"\r\n\r\n--\r\n--bx\r\r\n-\r\n--B--\r\n"
MIB = 1 << 20


def form(content: bytes) -> bytes:
    """A form with a field and a file, an empty line before, and white space after a boundary."""
    field = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision'
    file = b'--b \t\r\nX: y\r\ncontent-DISPOSITION: form-data; name="file"; filename="a"\r\n\r\n'
    return b"\r\n" + field + b"\r\n" + file + content + b"\r\n--b--\r\nignored\r\n--b\r\n"


def read(folder: Path, data: bytes, sizes: list[int]) -> tuple[bytes, dict[str, str]]:
    """The file and the fields of a form that arrives in pieces of these sizes, again and again."""
    path = folder / "file"
    path.unlink(missing_ok=True)
    upload = Upload(path, 64 * MIB)
    parser, start = UploadForm(TYPE, upload), 0
    while start < len(data):
        for size in sizes:
            parser.write(data[start : start + size])
            start += size
    parser.finish()
    upload.close()
    return path.read_bytes(), parser.fields


@pytest.mark.parametrize("content", [b"", b"\r\n", b"--b", TRICKY, TRICKY * 40])
def test_form_in_pieces_is_read_as_whole(tmp_path: Path, content: bytes) -> None:
    rng, data = random.Random(3), form(content)
    for sizes in ([len(data)], [1], [2, 3], *([rng.randint(1, 90) for _ in range(9)],) * 5):
        assert read(tmp_path, data, sizes) == (content, {"purpose": "vision"})


@pytest.mark.parametrize("unit", [b"\r\n--bx", b"\r", b"\r\n--", b"\r\n--b" + b" " * 60 + b"x"])
def test_almost_boundaries_cost_little_more_than_other_bytes(tmp_path: Path, unit: bytes) -> None:
    def seconds(unit: bytes) -> float:
        data, times = form(unit * (4 * MIB // len(unit))), list[float]()
        for _ in range(3):
            began = time.thread_time()
            read(tmp_path, data, [1 << 16])
            times.append(time.thread_time() - began)
        return min(times)

    assert seconds(unit) < 12 * seconds(b"x" * 7)
