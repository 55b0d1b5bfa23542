"""scripts/setup on a Mac without Xcode's tools: the Python in /usr/bin only opens a dialog."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
NONE = "#!/bin/sh\nexit 127\n"


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs one there")
def test_setup_ignores_xcode_python_stub(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "clone/scripts").mkdir(parents=True)
    shutil.copy(SCRIPTS / "setup", tmp_path / "clone/scripts")
    program_texts = {"uname": '#!/bin/sh\n[ "$1" = -s ] && echo Darwin || echo arm64\n'}
    program_texts |= dict.fromkeys(
        ["xcode-select", *(f"python3.{minor}" for minor in range(11, 15))], NONE
    )
    for name, text in program_texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    result = subprocess.run(
        [str(tmp_path / "clone/scripts/setup")],
        env={**os.environ, "PATH": f"{programs}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed and none was found: 'brew install" in result.stderr
