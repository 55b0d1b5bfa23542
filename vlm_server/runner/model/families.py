"""Which families of mlx-vlm are checked. Knows names alone; docs/families.md says of what."""

from __future__ import annotations

CHECKED = frozenset(
    {
        "gemma3",
        "gemma4",
        "glm4v",
        "idefics3",
        "internvl",
        "llava",
        "mistral3",
        "pixtral",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)
"""The `model_type`s whose tiny checkpoints pass tests/integration/test_families.py."""

WITH_VIDEO = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
)
"""Those that take a video whole: their towers see each group of frames alone, and their
processors need no torch. The others are shown its frames as pictures."""
