"""Foreign code does not run: neither a checkpoint's nor files planted in /tmp."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import video_files
from tests.support.daemons import Daemon, copied, is_alive, running_daemon, wait_until
from tests.support.images import image_part, noise

MODULES = ("queue", "msgspec", "numpy", "logging", "ctypes", "av")
OURS = ("vlm_server", "sitecustomize", "runpy")
"""What Python itself imports for `-m` before any line of ours: only `-P`, or the program
`vlm-server`, can keep these from being looked for in the working folder."""
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "s",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Trap:
    """A checkpoint with modules in its folder, and folders that others may have written to."""

    daemon: Daemon
    checkpoint: Path
    marks: Path
    shared: Path
    private: Path


def plant(folder: Path, marks: Path, modules: tuple[str, ...]) -> None:
    for name in modules:
        (folder / f"{name}.py").write_text(f"open({str(marks / name)!r}, 'a').close()\n1 / 0\n")


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trap]:
    folder = tmp_path_factory.mktemp("trap")
    names = ("marks", "shared", "caches")
    marks, shared, caches = (folder / name for name in names)
    for path in (marks, shared, caches):
        path.mkdir()
    model = copied("qwen3_vl", folder / "model")
    plant(model, marks, MODULES)
    with running_daemon(
        folder,
        *("--model", "."),
        cwd=model,
        environment={
            "TMPDIR": str(shared),
            "XDG_CACHE_HOME": str(caches),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    ) as daemon:
        yield Trap(daemon, model, marks, shared, caches / "vlm-server-private")


def ask_everything(daemon: Daemon) -> None:
    """Ask with an image, a video and a schema, so that every kind of child process runs."""
    clip = {
        "url": video_files.data_url(
            video_files.encode(video_files.moving("left", 8), "gif", "gif"), "gif"
        )
    }
    parts = [image_part(noise(1, (64, 64))), {"type": "video_url", "video_url": clip}]
    for content, fields in ((parts, {}), ("What?", {"response_format": SCHEMA})):
        daemon.client().chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
            max_tokens=8,
            **fields,  # type: ignore[arg-type]
        )


def restart_engine(daemon: Daemon) -> None:
    pid = daemon.engine_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 10, daemon.log)
    wait_until(lambda: daemon.status()["engine"]["pid"] not in (pid, None), 30, daemon.log)
    daemon.wait_ready()


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="Metal keeps no libraries there")
def test_compiled_kernels_lie_in_private_folder(trap: Trap) -> None:
    ask_everything(trap.daemon)
    assert not (trap.shared / "mlx").exists()
    assert list(trap.private.glob("tmp/mlx/*/cpu/*.so"))
    assert stat.S_IMODE(trap.private.stat().st_mode) == 0o700


@pytest.mark.whole
def test_engine_restarts_after_its_private_folder_was_replaced(
    trap: Trap,
) -> None:
    """Cleaners of temporary files remove the folder, which also holds OpenBLAS' links."""
    shutil.rmtree(trap.private, ignore_errors=True)
    planted = trap.shared / "planted"
    planted.mkdir()
    trap.private.symlink_to(planted)
    restart_engine(trap.daemon)
    assert trap.daemon.status()["engine"]["restarts"] == 1
    ask_everything(trap.daemon)
    assert not list(planted.iterdir())


@pytest.mark.whole
def test_modules_of_working_folder_are_never_imported(trap: Trap) -> None:
    """Runs last: front, engines, OpenBLAS trials, schemas and videos have had their processes."""
    assert not sorted(path.name for path in trap.marks.iterdir())


@pytest.mark.parametrize("program", ["vlm-server", "python -P -m vlm_server.cli"])
def test_command_line_imports_nothing_from_working_folder(tmp_path: Path, program: str) -> None:
    plant(tmp_path, tmp_path, MODULES + OURS)
    first, *rest = program.split()
    script = Path(sys.executable).with_name(first)
    if not script.exists():
        pytest.skip("it is not installed")
    ended = subprocess.run(
        [script, *rest, "check-config"], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert not [name for name in MODULES + OURS if (tmp_path / name).exists()]
