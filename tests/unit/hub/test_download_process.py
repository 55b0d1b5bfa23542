"""The process that downloads, by itself: how it ends while its parent still holds its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_download_process_exits_with_empty_stderr(tmp_path: Path) -> None:
    """Its thread that waits for the parent must not hold a lock that Python wants at the end."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm_server.hub.download_process", "org/name", ""],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said, complaint = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == 0
    process.stdin.close()
    assert complaint == b""
    assert json.loads(said)["type"] == "refused"
