"""What can be chosen on the command line: the keys of `servers.KINDS` and `scenarios.SCENARIOS`.

They stand here so that help is shown without importing those.
"""

from __future__ import annotations

KINDS = ("ours", "mlx-vlm")
SCENARIOS = ("repeat", "question", "agent", "stall", "conc", "text", "right")
