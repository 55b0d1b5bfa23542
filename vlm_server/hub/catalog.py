"""Checkpoints to begin with, whose families are tested: what *Models* on the page offers.

Sizes are computed, not read from the hub: the language model at 4.5 bits per parameter (8.5 with 8
bits), the vision tower at 16 (docs/choosing.md).
"""

from __future__ import annotations

import msgspec

from vlm_server.hub.names import HubName


class CatalogEntry(msgspec.Struct, frozen=True):
    """A checkpoint of the hub; `about_bytes` and `kv_bytes` (10,000 tokens) are computed."""

    name: str
    family: str
    parameters: float
    bits: int
    about_bytes: int
    kv_bytes: int
    about: str

    @property
    def hub_name(self) -> HubName:
        return HubName(self.name)


def _entry(
    name: str, family: str, billions: float, gigabytes: float, kv_gigabytes: float, about: str
) -> CatalogEntry:
    bits = 8 if name.endswith("8bit") else 4
    sizes = (int(1e9 * gigabytes), int(1e9 * kv_gigabytes))
    return CatalogEntry(f"mlx-community/{name}", family, 1e9 * billions, bits, *sizes, about)


CATALOG = (
    _entry("LFM2-VL-1.6B-4bit", "lfm2_vl", 1.6, 1.5, 0.1, "Small and quick; suits long chats."),
    _entry("Qwen3-VL-2B-Instruct-4bit", "qwen3_vl", 2.1, 1.8, 1.1, "Points at what it sees."),
    _entry("Qwen2.5-VL-3B-Instruct-4bit", "qwen2_5_vl", 3.8, 3.1, 0.4, "Points; suits long chats."),
    _entry("gemma-3-4b-it-4bit", "gemma3", 4.3, 3.0, 0.3, "Quick with large pictures."),
    _entry("Qwen3-VL-4B-Instruct-4bit", "qwen3_vl", 4.4, 3.1, 1.5, "A good start for agents."),
    _entry("Qwen2.5-VL-7B-Instruct-4bit", "qwen2_5_vl", 8.3, 5.4, 0.6, "Points; suits long chats."),
    _entry("Qwen3-VL-8B-Instruct-4bit", "qwen3_vl", 8.8, 5.8, 1.5, "Documents and screens."),
    _entry("gemma-3-12b-it-4bit", "gemma3", 12.2, 7.5, 0.7, "Quick with large pictures."),
    _entry("Qwen3-VL-8B-Instruct-8bit", "qwen3_vl", 8.8, 9.9, 1.5, "As in 4 bits, more exact."),
    _entry("gemma-3-27b-it-4bit", "gemma3", 27.4, 16.0, 0.9, "Quick with large pictures."),
    _entry("Qwen3-VL-30B-A3B-Instruct-4bit", "qwen3_vl_moe", 31, 18.0, 1.0, "Large, yet quick."),
    _entry("Qwen3-VL-32B-Instruct-4bit", "qwen3_vl", 33, 20.0, 2.6, "Large and thorough."),
    _entry("Qwen2.5-VL-72B-Instruct-4bit", "qwen2_5_vl", 73, 42.0, 3.3, "For large machines."),
)
"""By size, the smallest first."""
