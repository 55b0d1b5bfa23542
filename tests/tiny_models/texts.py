"""All text-only families by their names, which are mlx-vlm's folders'."""

from __future__ import annotations

from tests.tiny_models.checkpoint import Family
from tests.tiny_models.text_dense import DENSE
from tests.tiny_models.text_elsewhere import ELSEWHERE
from tests.tiny_models.text_experts import WITH_EXPERTS
from tests.tiny_models.text_lists import LISTS
from tests.tiny_models.text_recurrent import RECURRENT
from tests.tiny_models.text_scans import SCANS
from tests.tiny_models.text_windows import WINDOWS

TEXTS: dict[str, Family] = DENSE | ELSEWHERE | WITH_EXPERTS | WINDOWS | LISTS | RECURRENT | SCANS
