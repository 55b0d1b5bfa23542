"""A folder with the files of a checkpoint that are to be read, and its configuration as we read it.

mlx-vlm and transformers take a folder and look for names in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vlm_server.hub.layout import visible_files


@contextmanager
def view_of(folder: Path, config: dict[str, Any]) -> Iterator[Path]:
    """A folder of links to what `folder` holds, with `config` as its config.json.

    It is gone at the end: whatever is read lazily must be read by then.
    """
    with TemporaryDirectory(prefix="vlm-server-model-") as made:
        view = Path(made)
        for path in visible_files(folder):
            if path.name != "config.json":
                (view / path.name).symlink_to(path.absolute())
        (view / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield view
