"""The serving mechanisms of each tiny checkpoint's family, by column."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from vlm_server.runner.families.family import Family
from vlm_server.runner.families.table import FAMILIES
from vlm_server.runner.model.deepstack import Deepstack
from vlm_server.runner.vision.towers import DeepstackTower, FrameTower

WINDOWS = frozenset({"aya_vision", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "step3p7"})
"""Families with layers that keep the last tokens only."""
STATES = frozenset(
    {
        "glm5_next",
        "lfm2_vl",
        "nemotron_h_nano_omni",
        "qwen3_5",
        "qwen3_5_moe",
    }
)
"""Families with layers whose state can't be cut, or not even stored."""
ATOMIC = frozenset({"gemma4", "gemma4_unified", "paligemma"})
"""Families whose prompts are prefilled at once up to the last image's end, or to their own."""
WHOLE = frozenset({"paligemma"})
"""Families whose prompts are prefilled at once, with images or without."""
UNSTORED = WHOLE | {"glm5_next"}
"""Families whose KV is not used again: prompts are one chunk, or caches can't be stored."""
EXPERTS = frozenset(
    {
        "glm4v_moe", "glm5_next", "kimi_k25", "kimi_vl", "llama4", "nemotron_h_nano_omni",
        "step3p7", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl_moe"
    }
)  # fmt: skip
"""Families with mixtures of experts."""
COLUMNS = (
    "rope", "tower", "tiling", "deepstack", "caches", "prompts", "fix", "template", "media",
    "turns", "batches", "parts"
)  # fmt: skip


@cache
def mechanisms(family: str) -> dict[str, frozenset[str]]:
    """Column to the values that a family has in it."""
    row = FAMILIES[family]
    caches = {"windows": family in WINDOWS, "states": family in STATES}
    return {
        "rope": frozenset({row.mrope.name if row.mrope else "one position"}),
        "tower": _towers(row),
        "tiling": frozenset({type(row.tiling).__name__}) if row.tiling else NONE,
        "deepstack": frozenset({_deepstack(row)}),
        "caches": frozenset(name for name, has in caches.items() if has) or frozenset({"cut"}),
        "prompts": frozenset({_prompts(family)}),
        "fix": frozenset({"mended" if row.fix else "as it is"}),
        "template": frozenset({"an id of ours" if row.image_text else "its own id"})
        | frozenset({"ours"} if row.chat_template else ())
        | frozenset({"a frame"} if row.frame_tokens else ()),
        "media": frozenset({"videos" if row.takes_videos else "frames"}),
        "turns": frozenset({"by turns" if row.mrope and not row.tower else "at once"}),
        "batches": frozenset({"even rows" if row.needs_even_rows else "any rows"})
        | frozenset({"stacked images"} if row.stacks_images else ()),
        "parts": frozenset({row.part or "whole"})
        | frozenset({"experts"} if family in EXPERTS else ()),
    }


NONE = frozenset({"none"})


def mechanisms_of(family: str, columns: Iterable[str] = COLUMNS) -> frozenset[str]:
    """The mechanisms of a family as `column: value`; KeyError for an unknown column."""
    found = mechanisms(family)
    return frozenset(f"{column}: {value}" for column in columns for value in found[column])


def _prompts(family: str) -> str:
    if family in WHOLE:
        return "whole"
    return "atomic" if family in ATOMIC else "chunked"


def _towers(row: Family) -> frozenset[str]:
    if row.tower is None:
        return NONE
    return frozenset(c.__name__ for c in row.tower.__mro__ if issubclass(c, FrameTower))


def _deepstack(row: Family) -> str:
    if row.deepstack is not Deepstack.BY_LAYER:
        return row.deepstack.name
    has_one = row.tower is not None and issubclass(row.tower, DeepstackTower)
    return row.deepstack.name if has_one else "none"
