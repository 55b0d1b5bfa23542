"""The table of families of mlx-vlm: one row for each `model_type`, looked up once, at load.

No module elsewhere names a family or asks a model what it can do. To add one: CONTRIBUTING.md. A
family without a row is probed (`probe.py`), and served with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_vlm.utils import get_model_type

from vlm_server.runner.families.family import Family
from vlm_server.runner.families.text import TEXT_ROWS
from vlm_server.runner.families.vectors import EMBEDDING_ROWS
from vlm_server.runner.families.vision_language import VISION_LANGUAGE_ROWS

FAMILIES = {
    name: family
    for family in (*VISION_LANGUAGE_ROWS, *TEXT_ROWS, *EMBEDDING_ROWS)
    for name in (family.name, *family.aliases)
}


def row_of(config: Mapping[str, Any]) -> Family | None:
    """The row of a configuration's `model_type`, or of the one that mlx-vlm takes it for."""
    name = config.get("model_type")
    return FAMILIES.get(str(name)) or FAMILIES.get(str(get_model_type(dict(config))))


def with_module(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the `model_type` of the module that mlx-vlm has for it."""
    row = row_of(config)
    return {**config, **({"model_type": row.module} if row and row.module else {})}
