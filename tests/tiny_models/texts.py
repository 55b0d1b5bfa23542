"""All text-only families by their names, which are mlx-vlm's folders'."""

from __future__ import annotations

from tests.tiny_models.checkpoint import Family
from tests.tiny_models.text_dense import DENSE
from tests.tiny_models.text_experts import EXPERTS
from tests.tiny_models.text_recurrent import RECURRENT

TEXTS: dict[str, Family] = DENSE | EXPERTS | RECURRENT
