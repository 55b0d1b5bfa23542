"""The log file holds the output of all processes, and stays small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vlm_server.cli.log import LogFile
from vlm_server.errors import ConfigError

WRITER = """
import os, subprocess, sys
from pathlib import Path
from vlm_server.cli.log import LogFile

log = LogFile(Path(sys.argv[1]), max_bytes=1000, num_older=2)
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=sys.stderr)
for turn in range(5):
    print(f"{turn} " + "x" * 600, flush=True)
    child.stdin.write(f"{turn} child {'y' * 600}\\n".encode())
    child.stdin.flush()
    while f"{turn} child" not in Path(sys.argv[1]).read_text():
        pass
    log.rotate_if_large()
child.stdin.close()
child.wait()
print("the end")
"""


def test_child_output_survives_log_rotation(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "vlm-server.log"
    subprocess.run([sys.executable, "-c", WRITER, str(path)], check=True, timeout=20)
    assert path.read_text() == "the end\n", "no hole where the old lines were"
    assert "4 child" in path.with_name("vlm-server.log.1").read_text()
    assert path.with_name("vlm-server.log.2").read_text().startswith("3 x")
    assert len(list(path.parent.iterdir())) == 3
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


FULL_DISK = """
import sys
from pathlib import Path
from vlm_server.cli.log import LogFile

path = Path(sys.argv[1])
log = LogFile(path, max_bytes=1000, num_older=3)
print("x" * 2000, flush=True)
path.with_name(".vlm-server.log.draft").mkdir()  # stands in its place: no copy can be made
for _ in range(5):
    log.rotate_if_large()
"""


def test_failed_log_rotation_keeps_older_files(tmp_path: Path) -> None:
    path = tmp_path / "vlm-server.log"
    older = {path.with_name(f"vlm-server.log.{number}"): f"{number}\n" for number in (1, 2, 3)}
    for file, text in older.items():
        file.write_text(text)
    subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], check=True, timeout=20)
    assert {file: file.read_text() for file in older} == older
    assert path.read_text().startswith("xxx")


def test_unwritable_log_file_is_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't write"):
        LogFile(tmp_path)
