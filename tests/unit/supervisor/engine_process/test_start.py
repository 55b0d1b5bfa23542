"""Environment variables of processes that run models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vlm_server.platform import preload
from vlm_server.platform.private_folder import PrivateFolder
from vlm_server.settings import EngineSettings
from vlm_server.supervisor.engine_process.start import for_any_server, for_models


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateFolder]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = PrivateFolder()
    yield folder
    folder.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLX_CUDA_SDPA_CACHE_SIZE", "1024"),
        ("MLX_ENABLE_CACHE_THRASHING_CHECK", "0"),
        ("MLX_USE_CUDA_GRAPHS", "0"),
    ],
)
@pytest.mark.parametrize("told", [None, "300"])
def test_mlx_environment_defaults_yield_to_users_variables(
    name: str,
    value: str,
    told: str | None,
    private: PrivateFolder,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv(name, raising=False)
    if told is not None:
        monkeypatch.setenv(name, told)
    assert for_models(private, EngineSettings(openblas="off"))[name] == (told or value)


@pytest.mark.parametrize(
    ("blas", "heap", "ours", "expected"),
    [
        ("/blas.so", "/heap.so", "", "/blas.so:/heap.so"),
        ("/blas.so", "/heap.so", "/another.so", "/blas.so:/another.so:/heap.so"),
        (None, "/heap.so", "", "/heap.so"),
        (None, "/heap.so", "/another.so", "/another.so:/heap.so"),
        ("/blas.so", None, "/another.so", "/blas.so:/another.so"),
        (None, None, "/another.so", None),
    ],
)
def test_heap_is_preloaded_last(
    blas: str | None,
    heap: str | None,
    ours: str,
    expected: str | None,
    private: PrivateFolder,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("LD_PRELOAD", ours)
    monkeypatch.setattr(preload, "find_mimalloc", lambda: heap)
    found = {} if blas is None else {"LD_PRELOAD": preload._prepend("LD_PRELOAD", blas)}
    monkeypatch.setattr(preload, "find_openblas", lambda _: found)
    assert for_models(private, EngineSettings()).get("LD_PRELOAD") == expected
    without = for_models(private, EngineSettings(openblas="off", mimalloc="off"))
    assert "LD_PRELOAD" not in without


def test_compared_server_gets_no_mlx_variables(private: PrivateFolder):
    assert not any(name.startswith("MLX_") for name in for_any_server(private, with_openblas=False))
