"""A folder in which documented commands are run as a reader would, against a real daemon.

What differs from a reader's machine: the clone is there already; the daemon's port; `serve` ends
once its model is ready; `scripts/serve` skips the set-up; the hub is one of our own, which has the
embedded model's files under the names that pages use.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tests.docs.pages import ROOT
from tests.support import pdf
from tests.support.images import canvas, draw_shape, encoded
from tests.support.video_files import encode
from vlm_server.models import EMBEDDED

SECONDS = 240.0
_PROGRAM = """\
    #!{python} -P
    import os, signal, subprocess, sys

    SELF = [{python!r}, "-P", "-m", "vlm_server.cli"]
    words = {first!r} + sys.argv[1:]
    if words[:1] in (["ask"], ["connect"], ["doctor"], ["ps"]) and words != ["connect"]:
        words[1:1] = ["--set", "server.port={port}"]
    if words[:1] != ["serve"] or "--help" in words:
        os.execv(SELF[0], SELF + words)
    if "--port" in words:
        at = words.index("--port")
        del words[at : at + 2]
    daemon = subprocess.Popen(SELF + words + ["--port", "0"], stdout=subprocess.PIPE, text=True)
    is_ready = False
    for line in daemon.stdout:
        print(line, end="")
        if line.startswith("Ready: "):
            is_ready = True
            daemon.send_signal(signal.SIGTERM)
    sys.exit(daemon.wait() or (not is_ready))
"""


@dataclass(frozen=True)
class Sandbox:
    """`folder` is where commands are run. `port` is the daemon's, `home` is shared by all pages.

    `embedding_port` is that of a daemon that makes vectors, which pages have at 8001.
    """

    folder: Path
    port: int
    embedding_port: int
    home: Path
    hub_url: str

    @property
    def environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "XDG_"))
        }
        programs = [self.folder / ".bin", Path(sys.executable).parent]
        return inherited | {
            "HOME": str(self.home),
            "HF_ENDPOINT": self.hub_url,
            "HF_HUB_CACHE": str(self.folder / ".hub"),  # no page finds what another has pulled
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
        }

    def prepare(self) -> None:
        """The programs and files that pages speak of."""
        programs = {
            ".bin/vlm-server": [],
            ".venv/bin/vlm-server": [],
            "scripts/serve": ["serve"],
        }
        for name, first in programs.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = dedent(_PROGRAM)
            path.write_text(text.format(python=sys.executable, first=first, port=self.port))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        python = self.folder / ".venv/bin/python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        (self.home / ".curlrc").write_text("fail-with-body\n")  # an error is one for curl, too
        image, clip = draw_files()
        (self.folder / "docs").symlink_to(ROOT / "docs")
        for name in ("before", "after"):
            (self.folder / f"{name}.png").write_bytes(image)
        (self.folder / "question.txt").write_text("What shape is red?")
        (self.folder / "clip.mp4").write_bytes(clip)
        page = pdf.Page((300, 300)).text(40, 130, 60, "4711")
        (self.folder / "report.pdf").write_bytes(pdf.write([page]))
        (self.folder / "checkpoint").symlink_to(EMBEDDED)

    def placed(self, text: str) -> str:
        """`text` of a page, with this daemon's port and this folder's checkpoint."""
        text = re.sub(r"(?m)^git clone \S+ && cd \w+\n", "", text)
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        text = text.replace("127.0.0.1:8001", f"127.0.0.1:{self.embedding_port}")
        return text.replace("/path/to/checkpoint", str(self.folder / "checkpoint"))

    def shell(self, text: str) -> str:
        """The output of commands. Raises AssertionError if one fails."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.placed(text)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def draw_files() -> tuple[bytes, bytes]:
    """An image of a red circle and a blue star, and a clip of a circle that moves."""
    image = draw_shape(canvas(), "circle", "red", (120, 130), 70)
    image = draw_shape(image, "star", "blue", (320, 310), 90)
    frames = [draw_shape(canvas(), "circle", "red", (60 + 30 * i, 224), 50) for i in range(12)]
    return encoded(image), encode(frames)
