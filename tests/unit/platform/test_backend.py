"""Errors where MLX can't be loaded; commands without a model work there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from vlm_server.hub.examination import Examination, ExaminationRequest
from vlm_server.platform import backend
from vlm_server.settings import MemorySettings, ModelSettings

WITHOUT_BACKEND = """
import importlib.machinery, sys

class NoBackend:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx":
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [__file__ + ".mlx"]
            return spec
        if name.startswith(("mlx", "transformers")):
            raise ImportError("libmlx.so: cannot open shared object file")

sys.meta_path.insert(0, NoBackend())
"""
"""Runs in each Python that is started with this `sitecustomize.py`: all of ours inherit it."""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment of an installation whose MLX has no backend."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_BACKEND)
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    home = tmp_path / "home"
    home.mkdir()
    return {**os.environ, "PYTHONPATH": paths, "HOME": str(home), "HF_HOME": str(home)}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "vlm_server.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_backend_check_passes_where_mlx_is_installed() -> None:
    backend.check()


@pytest.mark.parametrize("command", ["serve", "ask PICTURE what", "models check MODEL"])
def test_commands_with_model_report_missing_extra(
    command: str, bare: dict[str, str], tmp_path: Path
) -> None:
    image = tmp_path / "picture.png"
    Image.new("RGB", (8, 8)).save(image)
    demo = Path(backend.__file__).parents[1] / "models/demo"
    words = command.replace("PICTURE", str(image)).replace("MODEL", str(demo)).split()
    ended = run(bare, *words, *(("--port", "0") if command == "serve" else ()))
    assert ended.returncode == 3, ended
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("vlm-server: ")
    assert "install vlm-server[cpu], or vlm-server[cuda]" in last
    assert "Traceback" not in ended.stderr
    assert ended.stdout == "" or command != "serve"


NOT_INSTALLED = 4
STATUSES = {
    "--version": 0,
    "--help": 0,
    "check-config": 0,
    "models list": 0,
    "service status": NOT_INSTALLED,
}
COMMANDS = """
import contextlib, io, json, sys
from vlm_server.cli.main import main
for words in sys.argv[1:]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            code = main(words.split())
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([words, code, bool(shown.getvalue())]))
"""


def test_commands_without_model_work_without_mlx(bare: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS, *STATUSES],
        env=bare,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not ended.stderr
    reported = [json.loads(line) for line in ended.stdout.splitlines()]
    assert reported == [[words, code, True] for words, code in STATUSES.items()]


def test_unloadable_mlx_library_is_reported_without_traceback(
    bare: dict[str, str], tmp_path: Path
) -> None:
    """One that wants a driver, say: the engine says so, once and without a traceback."""
    library = tmp_path / "site/sitecustomize.py.mlx/lib/libmlx.so"
    library.parent.mkdir(parents=True)
    library.touch()
    ended = run(bare, "serve", "--port", "0")
    assert ended.returncode == 3
    assert "MLX can't be loaded: libmlx.so" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_checkpoint_examination_fails_without_mlx(bare: dict[str, str]) -> None:
    request = ExaminationRequest(ModelSettings(path="/nowhere"), MemorySettings())
    said = subprocess.run(
        [sys.executable, "-P", "-m", "vlm_server.examine", "checkpoint"],
        env=bare,
        input=msgspec.json.encode(request),
        capture_output=True,
        timeout=60,
    ).stdout
    refusal = msgspec.json.decode(said, type=Examination).refusal
    assert "MLX can't be loaded: libmlx.so" in refusal
    assert "vlm-server[cpu]" in refusal


def test_library_next_to_module_counts_as_installed(tmp_path: Path) -> None:
    """No process is started then: that takes time at every start."""
    assert not backend.has_library([str(tmp_path)])
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libmlx.so").touch()
    assert backend.has_library(["/nowhere", str(tmp_path)])


def test_import_errors_of_other_libraries_are_no_missing_backend() -> None:
    said = backend.not_loaded(ImportError("No module named 'tokenizers'"))
    assert "tokenizers" in said
    assert "cuda" not in said
    driver = backend.not_loaded(ImportError("libcuda.so.1: cannot open shared object file"))
    assert "no NVIDIA driver" in driver
    assert "vlm-server[cpu] in place of vlm-server[cuda]" in driver
    assert "vlm-server[cpu]" in backend.not_loaded(ImportError("libcudart.so.13: cannot open"))
