"""The model's dimensions, and the picture sizes its processor makes. Knows no PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

PATCH = 16
MERGE = 2
BLOCK = PATCH * MERGE
MIN_PIXELS = 224 * 224
MAX_PIXELS = 416 * 416
VIDEO_MIN_PIXELS = 4 * 128 * 128
VIDEO_MAX_PIXELS = 4 * 448 * 448
VIDEO_FPS = 2.0


@dataclass(frozen=True)
class TextShape:
    vocab: int = 528
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 448
    rope_theta: float = 10000.0
    mrope_section: tuple[int, int, int] = (12, 10, 10)
    rms_eps: float = 1e-6
    max_positions: int = 8192
    usable_tokens: int = 4096
    """Longer conversations go wrong, as measured: see the model card."""


@dataclass(frozen=True)
class VisionShape:
    hidden: int = 192
    layers: int = 7
    heads: int = 4
    intermediate: int = 512
    positions: int = 16 * 16
    deepstack: tuple[int, ...] = (3,)


@dataclass(frozen=True)
class ModelShape:
    text: TextShape = TextShape()
    vision: VisionShape = VisionShape()


def smart_resize(
    height: int, width: int, minimum: int = MIN_PIXELS, maximum: int = MAX_PIXELS
) -> tuple[int, int]:
    """(height, width) that the processor resizes a picture to: Qwen2-VL's `smart_resize`."""
    rows = round(height / BLOCK) * BLOCK
    cols = round(width / BLOCK) * BLOCK
    if rows * cols > maximum:
        beta = math.sqrt(height * width / maximum)
        rows = max(BLOCK, math.floor(height / beta / BLOCK) * BLOCK)
        cols = max(BLOCK, math.floor(width / beta / BLOCK) * BLOCK)
    elif rows * cols < minimum:
        beta = math.sqrt(minimum / (height * width))
        rows = math.ceil(height * beta / BLOCK) * BLOCK
        cols = math.ceil(width * beta / BLOCK) * BLOCK
    return rows, cols
