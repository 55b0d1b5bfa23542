"""What `process` and the engine's side of it send each other."""

from __future__ import annotations

import struct

COMPILED = struct.Struct("<QI")
"""What a grammar takes for itself, in bytes, and the size of a mask, which follows."""
BEGIN = struct.Struct("<I")
"""How many answers; comes with their socket."""
PID = struct.Struct("<I")
TOKEN = struct.Struct("<Ii")
"""An answer and the token that was drawn for it."""
MASK = struct.Struct("<?f")
"""Whether the answer can go on, and the CPU seconds that it took; the mask follows."""


class SchemaError(Exception):
    """A schema that can't be obeyed; the message says why, in one line."""
