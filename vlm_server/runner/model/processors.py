"""Mends processors of mlx-vlm that fail on every picture. Knows their classes; no model."""

from __future__ import annotations

from typing import Any

from mlx_vlm.models.llava.processing_llava import LlavaProcessor


def mend(processor: Any) -> None:
    """Change `processor` so that it takes pictures; most need nothing."""
    if isinstance(processor, LlavaProcessor):
        processor.image_processor = _PicturesOnly(processor.image_processor)


class _PicturesOnly:
    """An image processor that is handed the tokenizer's options too, and would refuse them."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.model_input_names = inner.model_input_names

    def __call__(self, images: Any, **_: Any) -> Any:
        return self._inner(images)
