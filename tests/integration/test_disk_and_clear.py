"""Reading from disk on one thread, and giving memory back on another."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: MLX waiting for itself can't be interrupted.
READ_AND_CLEAR = """
import threading, time
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from vlm_server.runner.disk.records import Record, features_record
from vlm_server.runner.encode.encoder import ImageFeatures

with TemporaryDirectory() as folder:
    path = Path(folder) / "record.safetensors"
    features_record("", "", ImageFeatures(mx.ones((64, 64)), None, None)).write(path)
    data = path.read_bytes()
end = time.monotonic() + 3
def read():
    while time.monotonic() < end:
        Record.read(data)
thread = threading.Thread(target=read)
thread.start()
while thread.is_alive():
    mx.eval(mx.ones(100) + 1)
    mx.clear_cache()
"""


def test_disk_record_is_read_while_memory_is_cleared():
    subprocess.run([sys.executable, "-c", READ_AND_CLEAR], timeout=60, check=True)
