"""Settings of uploaded files."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import MIB, AbsolutePath, Auto


class FileSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    folder: Annotated[AbsolutePath, Auto] = ""
    """Absolute path of a folder of your own in which uploaded files outlive the daemon; one daemon
    at a time uses it. `auto` is a temporary folder, which is gone when the daemon stops."""
    max_bytes: Annotated[int, Meta(ge=0)] = 1024 * MIB
    """Maximum disk space of all uploaded files, each counted as 16 KiB more than its size. API keys
    share it; the least recently used file of the one with the most is dropped first. 0 takes no
    files."""
    max_file_bytes: Annotated[int, Meta(ge=1024)] = 256 * MIB
    """Maximum size of an uploaded file, within `files.max_bytes`."""
    keep_seconds: Annotated[float, Meta(gt=0)] = 86400.0
    """Time after its last use for which an uploaded file is kept."""
    upload_timeout_seconds: Annotated[float, Meta(gt=0)] = 300.0
    """Time within which an upload must arrive."""
