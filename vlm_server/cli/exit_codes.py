"""The exit codes of `vlm-server`. A service manager restarts after some, and not after others."""

from __future__ import annotations

FAILURE = 1
WRONG_SETTINGS = 2
"""Wrong arguments or settings: a restart does not help."""
MODEL_UNUSABLE = 3
"""The model can't be loaded, or does not fit: a restart does not help."""
NOT_AVAILABLE = 75
"""What the settings name is not there at present: a port in use, an address that is not up, a disk
that is not mounted. It may be later (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130

FINAL = (WRONG_SETTINGS, MODEL_UNUSABLE)
