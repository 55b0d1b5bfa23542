"""All settings, in one typed tree, and how they are read.

A setting is one field with its name, type, bounds, default and description. Settings are read
from a TOML file (`configs/default.toml` lists all of them) and from `section.key=value`
overrides. Unknown names are errors.
"""

from __future__ import annotations

from vlm_server.settings.engine import Distributed, EngineSettings, SchedulerSettings
from vlm_server.settings.front import Deadlines, Limits, Server, Urls
from vlm_server.settings.media import ImageSettings, VideoSettings
from vlm_server.settings.memory import CacheSettings, MemorySettings
from vlm_server.settings.model import Checkpoint, ListedModel, ModelSettings
from vlm_server.settings.quantities import MAX_FLOAT, MAX_INT, MIB, MIN_KEY_CHARS
from vlm_server.settings.telemetry import Log, Metrics, Tracing
from vlm_server.settings.tree import (
    ORIGIN,
    Settings,
    Sources,
    described,
    fault_of_key,
    is_loopback,
    load,
    load_with_sources,
)

__all__ = [
    "MAX_FLOAT",
    "MAX_INT",
    "MIB",
    "MIN_KEY_CHARS",
    "ORIGIN",
    "CacheSettings",
    "Checkpoint",
    "Deadlines",
    "Distributed",
    "EngineSettings",
    "ImageSettings",
    "Limits",
    "ListedModel",
    "Log",
    "MemorySettings",
    "Metrics",
    "ModelSettings",
    "SchedulerSettings",
    "Server",
    "Settings",
    "Sources",
    "Tracing",
    "Urls",
    "VideoSettings",
    "described",
    "fault_of_key",
    "is_loopback",
    "load",
    "load_with_sources",
]
