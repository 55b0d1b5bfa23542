"""mimalloc is preloaded where MLX is for CUDA, and only if a process starts with it."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError, PathDistribution, distribution
from pathlib import Path

import pytest

from vlm_server.platform import preload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the preload is for Linux")

LIBRARY = str(distribution("cmeel-mimalloc").locate_file("cmeel.prefix/lib/libmimalloc.so.3"))


def install(monkeypatch: pytest.MonkeyPatch, *packages: str, root: Path | None = None) -> None:
    """Let these be the installed packages, the library being the real one or under `root`."""
    real = distribution("cmeel-mimalloc")
    found = real if root is None else PathDistribution(root / "of-package.dist-info")

    def look(name: str) -> object:
        if name not in packages:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(preload, "distribution", look)


@pytest.mark.parametrize("mlx", ["mlx-cuda-13", "mlx-cuda-12"])
def test_mimalloc_is_found_next_to_mlx_for_cuda(monkeypatch: pytest.MonkeyPatch, mlx: str):
    install(monkeypatch, mlx, "cmeel-mimalloc")
    assert preload.find_mimalloc() == LIBRARY


def test_mimalloc_is_not_used_with_mlx_for_cpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    install(monkeypatch, "mlx-cpu", "cmeel-mimalloc")
    assert preload.find_mimalloc() is None
    assert not caplog.text


def test_missing_mimalloc_warning_names_package(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    install(monkeypatch, "mlx-cuda-13")
    with caplog.at_level(logging.WARNING):
        assert preload.find_mimalloc() is None
    assert "pip install cmeel-mimalloc" in caplog.text


@pytest.mark.parametrize("content", [None, b"no library"])
def test_unloadable_mimalloc_is_not_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
):
    library = tmp_path / "cmeel.prefix" / "lib" / "libmimalloc.so.3"
    library.parent.mkdir(parents=True)
    if content is not None:
        library.write_bytes(content)
    install(monkeypatch, "mlx-cuda-13", "cmeel-mimalloc", root=tmp_path)
    assert preload.find_mimalloc() is None


def test_hanging_mimalloc_is_not_preloaded(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "mlx-cuda-13", "cmeel-mimalloc")
    monkeypatch.setattr(preload, "_MIMALLOC_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(preload, "_SECONDS", 0.3)
    assert preload.find_mimalloc() is None
