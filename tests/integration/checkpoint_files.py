"""Changes to a checkpoint's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON object; a missing file counts as an empty one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))
