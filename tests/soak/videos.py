"""Makes small random videos, which no server has cached."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from PIL import Image

from vlm_server.cli.bench.material import random_png

_FRAMES = 6
_FRAME_MILLISECONDS = 200
_SIZE = (128, 96)


def random_gif(rng: random.Random) -> bytes:
    """A second of random blocks; determined by `rng`."""
    first, *others = (Image.open(io.BytesIO(random_png(_SIZE, rng))) for _ in range(_FRAMES))
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=_FRAME_MILLISECONDS)
    return file.getvalue()


def video_part(gif: bytes) -> dict[str, Any]:
    """`gif` as a content part of a message."""
    url = "data:video/gif;base64," + base64.b64encode(gif).decode()
    return {"type": "video_url", "video_url": {"url": url}}
