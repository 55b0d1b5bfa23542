"""A rehearsed release: built twice, uploaded to an index, installed from there, and asked."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.release.artifacts import CheckFailed
from scripts.release.clone import ADDRESSED, EXAMPLE, IDENTITY, clone

ROOT = Path(__file__).parents[3]
HAS_TOOLS = all(map(importlib.util.find_spec, ("build", "cyclonedx_py", "pypiserver", "twine")))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files that a rehearsal leaves."""
    out = tmp_path_factory.mktemp("released")
    words = ["--rehearse", "9.8.7", "--uv", "--out", str(out)]
    ended = subprocess.run(
        [sys.executable, "-m", "scripts.release", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TOOLS, reason="needs `scripts/setup dev release`")
def test_rehearsal_leaves_packages_and_their_contents(released: Path) -> None:
    (wheel,), (sdist,) = released.glob("*.whl"), released.glob("*.tar.gz")
    assert wheel.name == "vlm_server-9.8.7-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert "vlm_server/models/demo/model.safetensors" in archive.namelist()
        assert {each.date_time[:3] for each in archive.infolist()} == {(2020, 2, 2)}
    with tarfile.open(sdist) as archive:
        assert {(each.uid, each.uname) for each in archive.getmembers()} == {(0, "")}
    contents = json.loads((released / "vlm_server-9.8.7.cdx.json").read_text(encoding="utf-8"))
    names = {component["name"] for component in contents["components"]}
    assert contents["metadata"]["component"]["name"] == "vlm-server"
    assert {"mlx-vlm", "mlx-cpu"} <= names
    assert not {"opencv-python", "datasets"} & names


def test_release_needs_address_and_tag(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ADDRESSED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)

    def git(*words: str) -> None:
        subprocess.run(["git", *IDENTITY, *words], cwd=root, check=True)

    def commit(address: str) -> None:
        for name in ADDRESSED:
            (root / name).write_text(address, encoding="utf-8")
        git("add", "--all")
        git("commit", "--quiet", "--message", "a state")

    git("init", "--quiet")
    commit("https://git.example/OWNER/vlm_server")
    with pytest.raises(CheckFailed, match="write the account in place"):
        clone(root, tmp_path / "without-address", None)
    rehearsed = clone(root, tmp_path / "rehearsed", "1.2.3")
    for name in ADDRESSED:
        assert EXAMPLE in (rehearsed / name).read_text(encoding="utf-8")
    commit("https://git.example/us/vlm_server")
    with pytest.raises(CheckFailed, match="has no tag"):
        clone(root, tmp_path / "without-tag", None)
    git("tag", "v1.2.3")
    clone(root, tmp_path / "released", None)
