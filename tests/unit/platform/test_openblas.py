"""Candidates that can't load, die, or multiply wrongly are never preloaded."""

import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_server.platform import preload

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="the preload is for Linux"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler"),
]

SGEMM = """
#include <signal.h>
#include <unistd.h>
void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    %s
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += a[i * lda + l] * b[l * ldb + j];
            c[i * ldc + j] = sum %s;
        }
}
"""
SOURCES = {
    "right": SGEMM % ("", ""),
    "wrong": SGEMM % ("", "+ 1"),
    "illegal instruction": SGEMM % ("raise(SIGILL);", ""),
    "dies when loaded": "__attribute__((constructor)) void f(void) { __builtin_trap(); }",
    "without the function": "int nothing;",
    "hangs": SGEMM % ("pause();", ""),
}


def build(folder: Path, kind: str) -> dict[str, str]:
    """The environment that preloads a library of `kind`."""
    library = folder / f"lib{kind.replace(' ', '_')}.so.0"
    if kind == "no library":
        library.write_bytes(b"not a library")
    elif kind == "needs another":
        other, source = folder / "libother.so", folder / "needs.c"
        source.write_text("int other(void); int f(void) { return other(); }")
        compile_c("int other(void) { return 1; }", other)
        arguments = ["-Wl,--no-as-needed", "-L", str(folder), "-lother"]
        compile_c(SOURCES["right"], library, *arguments)
        other.unlink()
    elif kind != "missing":
        compile_c(SOURCES[kind], library)
    return {"LD_PRELOAD": str(library)}


def compile_c(source: str, library: Path, *arguments: str) -> None:
    file = library.with_suffix(".c")
    file.write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-O0", "-o", str(library), str(file), *arguments]
    subprocess.run(command, check=True, capture_output=True)


def test_correct_openblas_candidate_is_accepted(tmp_path: Path):
    assert preload.runs(preload._BLAS_PROBE, build(tmp_path, "right"))


@pytest.mark.parametrize(
    "kind",
    [
        "wrong",
        "illegal instruction",
        "dies when loaded",
        "without the function",
        "no library",
        "needs another",
        "missing",
    ],
)
def test_broken_openblas_candidate_is_refused(tmp_path: Path, kind: str):
    assert not preload.runs(preload._BLAS_PROBE, build(tmp_path, kind))


def test_hanging_openblas_candidate_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preload, "_SECONDS", 0.5)
    assert not preload.runs(preload._BLAS_PROBE, build(tmp_path, "hangs"))


def test_first_working_openblas_candidate_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    kinds = ("missing", "illegal instruction", "wrong", "right")
    candidates = [build(tmp_path, kind) for kind in kinds]
    monkeypatch.setattr(preload, "_candidates", lambda _: iter(candidates))
    with caplog.at_level(logging.DEBUG):
        assert preload.find_openblas(tmp_path / "links") == candidates[-1]
    assert "libright" in caplog.text


def test_missing_openblas_is_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(preload, "_candidates", lambda _: iter([build(tmp_path, "wrong")]))
    with caplog.at_level(logging.WARNING):
        assert preload.find_openblas(tmp_path / "links") == {}
    assert "slower" in caplog.text


def test_python_starts_with_openblas_environment(tmp_path: Path):
    environment = preload.find_openblas(tmp_path / "links")
    done = subprocess.run(
        [sys.executable, "-c", "print(2)"], env={**os.environ, **environment}, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"2\n", b"")


def test_removed_fortran_links_are_created_again(tmp_path: Path):
    packages, links = tmp_path / "packages", tmp_path / "links"
    bundled = packages / "mlx_cpu.libs"
    bundled.mkdir(parents=True)
    (bundled / "libgfortran-1.so.5.0.0").touch()
    for _ in range(2):
        assert preload._link_fortran(packages, links) == links
        assert (links / "libgfortran.so.5").readlink() == bundled / "libgfortran-1.so.5.0.0"
        shutil.rmtree(links)


def test_openblas_probe_imports_nothing_from_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "ctypes.py").write_text("open('mark', 'w'); raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    assert not preload.runs(preload._BLAS_PROBE, {"LD_PRELOAD": str(tmp_path / "missing.so")})
    assert not (tmp_path / "mark").exists()
