"""Files that another user may have planted are never used; removed folders are created again."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlm_server.platform import private_folder
from vlm_server.platform.private_folder import PrivateFolder


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    caches_path = tmp_path / "home" / "caches"
    monkeypatch.setattr(private_folder, "caches_folder", lambda _: caches_path)
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(tmp_path))
    return caches_path


@pytest.fixture
def private(caches: Path) -> Iterator[PrivateFolder]:
    folder = PrivateFolder()
    yield folder
    folder.close()


def test_private_folder_is_stable_and_only_for_its_user(
    caches: Path, private: PrivateFolder
) -> None:
    folder = private.path()
    assert folder == private.path() == PrivateFolder().path()
    assert folder.parent == caches
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_removed_private_folder_is_created_again(private: PrivateFolder) -> None:
    first = private.environment()
    shutil.rmtree(private.path())
    assert private.environment() == first
    assert Path(first["TMPDIR"]).is_dir()


def plant_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


def plant_dangling(path: Path) -> None:
    path.symlink_to(path.parent / "not-yet")


def plant_open(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def plant_foreign(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)


def plant_file(folder: Path) -> None:
    folder.touch()


@pytest.mark.parametrize("plant", [plant_link, plant_open, plant_foreign, plant_file])
def test_planted_private_folder_is_not_used(
    caches: Path, private: PrivateFolder, plant: object, caplog: pytest.LogCaptureFixture
) -> None:
    caches.mkdir(parents=True)
    planted = caches / "vlm-server-private"
    plant(planted)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        folder = private.path()
    assert folder != planted
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder == private.path()
    assert len(caplog.records) == 1
    assert "private folder" in caplog.text
    shutil.rmtree(folder)
    assert private.path().is_dir()
    private.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("inner", "plant"),
    [
        *(
            (inner, plant)
            for inner in ("tmp", "libraries")
            for plant in (plant_link, plant_open, plant_foreign, plant_file)
        ),
        ("tmp/mlx", plant_link),
        ("tmp/mlx", plant_dangling),
        ("tmp/mlx/0.32/cpu", plant_link),
    ],
)
def test_planted_entry_of_private_folder_is_not_used(
    private: PrivateFolder, inner: str, plant: object, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder holds executed code: MLX's kernels, and libraries that are preloaded."""
    first = private.path()
    planted = first / inner
    shutil.rmtree(planted, ignore_errors=True)
    planted.parent.mkdir(parents=True, exist_ok=True)
    plant(planted)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        temporary = Path(private.environment()["TMPDIR"])
    assert not temporary.is_relative_to(first)
    assert temporary.parent == private.path()
    assert str(planted) in caplog.text


def test_folder_replaceable_by_other_users_is_not_used(
    caches: Path, private: PrivateFolder
) -> None:
    caches.mkdir(parents=True)
    caches.chmod(0o777)
    assert private.path().parent != caches
    caches.chmod(0o1777)  # as /tmp: nobody may rename what is another's
    assert private.path().parent == caches


def test_missing_home_gives_fresh_private_folder(
    private: PrivateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(private_folder, "caches_folder", homeless)
    assert private.path().is_dir()


def test_forget_kernels_leaves_those_of_other_engines(private: PrivateFolder) -> None:
    """Other daemons of this user may still be using their kernels."""
    kernel = Path(private.environment()["TMPDIR"]) / "mlx" / "libkernel.so"
    kernel.parent.mkdir()
    kernel.touch()
    owns = []
    for _ in range(2):
        private.forget_kernels()
        assert all(own.exists() for own in owns)  # engines of other models may be using them
        own = Path(private.environment()["TMPDIR"])
        assert own.parent == private.path()
        assert list(own.iterdir()) == []
        (own / "mlx").mkdir()
        owns.append(own)
    assert kernel.exists()
    private.close()
    assert not any(own.exists() for own in owns)
    assert private.environment()["TMPDIR"] == str(kernel.parent.parent)


def test_files_of_killed_engines_are_removed_after_one_day(private: PrivateFolder) -> None:
    folder = Path(private.environment()["TMPDIR"])
    kernels, old, young = folder / "mlx", folder / "vlm-server-model-a", folder / "vlm-server-b"
    elsewhere = folder.parent / "elsewhere"
    for each in (kernels, old, elsewhere):
        each.mkdir()
    (old / "config.json").symlink_to(elsewhere)
    young.touch()
    (folder / "vlm-server-c").touch()
    for each in (kernels, old, folder / "vlm-server-c"):
        os.utime(each, (0, 0))
    private.environment()
    assert sorted(folder.iterdir()) == [kernels, young]
    assert elsewhere.exists()
