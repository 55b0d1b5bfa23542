"""What can be chosen on the command line: the keys of `servers.KINDS`, those of
`scenarios.usual.SCENARIOS`, and `day.NAME`.

They stand here so that help is shown without importing those.
"""

from __future__ import annotations

KINDS = ("ours", "mlx-vlm")
USUAL = (
    "repeat",
    "question",
    "agent",
    "agent-window",
    "agent-drops",
    "stall",
    "conc",
    "text",
    "right",
)
"""The scenarios that run unless others are named."""
SCENARIOS = (*USUAL, "streams", "longagent", "agents4", "day")
