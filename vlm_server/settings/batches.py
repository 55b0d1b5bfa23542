"""Settings of batches."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import MIB


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_running: Annotated[int, Meta(ge=0, le=1024)] = 4
    """Maximum number of lines that are run at the same time. 0 takes no batches."""
    min_idle_seconds: Annotated[float, Meta(ge=0)] = 1.0
    """Minimum time without another request before a line is begun."""
    on_battery: bool = False
    """Whether lines are run while the machine is on battery."""
    max_batches_per_key: Annotated[int, Meta(ge=1)] = 100
    """Maximum number of batches of an API key. The oldest one that has ended makes room."""
    max_lines: Annotated[int, Meta(ge=1)] = 50_000
    """Maximum number of lines of a batch."""
    max_line_bytes: Annotated[int, Meta(ge=1024)] = 8 * MIB
    """Maximum size of a line."""
    max_output_bytes: Annotated[int, Meta(ge=1024)] = 256 * MIB
    """Maximum size of a batch's results, within `files.max_file_bytes`. A result past it is
    replaced by an error."""
