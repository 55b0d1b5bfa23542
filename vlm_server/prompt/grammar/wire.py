"""What `process` and the engine's side of it send each other."""

from __future__ import annotations

import struct

COMPILED = struct.Struct("<QI")
"""What a grammar takes for itself, in bytes, and the size of a mask, which follows."""
BEGIN = struct.Struct("<I")
"""How many answers; comes with their socket."""
PID = struct.Struct("<I")
TOKENS = struct.Struct("<IHH")
"""An answer, how many tokens were drawn for it, and how many may be drawn next; their ids follow.

A mask comes back for what may follow the drawn ones, if there are any, and one for each that may be
drawn next.
"""
MAX_FORCED = 16
MASK = struct.Struct(f"<?fB{MAX_FORCED}i")
"""Whether the answer can go on, the CPU seconds that it took, and forced tokens, their number
first; the mask follows."""


class SchemaError(Exception):
    """A schema that can't be obeyed; the message says why, in one line."""
