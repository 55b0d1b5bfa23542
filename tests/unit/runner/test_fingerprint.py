"""A file that was changed is never taken for the old one; one that was not is not read again."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

import vlm_server
from vlm_server.runner import fingerprint
from vlm_server.runner.fingerprint import (
    Checkpoint,
    KeptHashes,
    program_digest,
    sources,
    state_fingerprint,
)

MIB = 1 << 20
PACKAGE = Path(vlm_server.__file__).parent
COMPUTING = ("cache", "engine", "interfaces", "platform", "prompt", "protocol", "runner")
"""The packages of the engine process."""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A weights file, written before its first fingerprint."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    path = folder / "model.safetensors"
    path.write_bytes(bytes(5 * MIB))
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read whole."""
    names: list[str] = []
    whole = fingerprint._sha256

    def noting(path: Path) -> str:
        names.append(path.name)
        return whole(path)

    monkeypatch.setattr(fingerprint, "_sha256", noting)
    return names


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all files written so far count as old."""
    later = time.time_ns() + 60_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)


def named(weights: Path) -> str:
    hashes = KeptHashes(weights.parents[1] / "cache" / "hashes.json")
    return Checkpoint(weights.parent, "auto").fingerprint(hashes)


def test_unchanged_file_is_hashed_once(
    weights: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
):
    settle(monkeypatch)
    first = named(weights)
    assert "model.safetensors" in read
    read.clear()
    assert named(weights) == first
    assert "model.safetensors" not in read
    kept = weights.parents[1] / "cache" / "hashes.json"
    assert kept.stat().st_mode & 0o077 == 0


def test_recently_written_file_is_hashed_again(weights: Path, read: list[str]):
    first = named(weights)
    read.clear()
    assert named(weights) == first
    assert "model.safetensors" in read


@pytest.mark.parametrize("restores_time", [False, True])
@pytest.mark.parametrize("at", [0, 2 * MIB + 5, 5 * MIB - 1])
def test_in_place_change_changes_fingerprint(
    weights: Path, monkeypatch: pytest.MonkeyPatch, at: int, restores_time: bool
):
    """Of one byte, of the same size, and with the old time of change put back."""
    settle(monkeypatch)
    first = named(weights)
    stat = weights.stat()
    while os.stat(weights).st_ctime_ns == stat.st_ctime_ns:
        with weights.open("r+b") as file:
            file.seek(at)
            file.write(b"\x01")
    if restores_time:
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert weights.stat().st_mtime_ns == stat.st_mtime_ns
    assert named(weights) != first


def test_replaced_file_changes_fingerprint(weights: Path, monkeypatch: pytest.MonkeyPatch):
    settle(monkeypatch)
    first = named(weights)
    other = weights.with_name("other")
    other.write_bytes(bytes(5 * MIB - 1) + b"\x01")
    stat = weights.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(weights)
    assert named(weights) != first


def test_half_written_hash_file_of_same_pid_is_ignored(
    weights: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
):
    """The earlier process had the same process id."""
    settle(monkeypatch)
    kept = weights.parents[1] / "cache" / "hashes.json"
    kept.parent.mkdir()
    kept.with_name(f"{kept.name}.{os.getpid()}").write_bytes(bytes(1 << 16))
    first = named(weights)
    read.clear()
    assert named(weights) == first
    assert "model.safetensors" not in read


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model-2.safetensors"])
def test_checkpoint_changed_after_loading_gets_no_fingerprint(weights: Path, name: str):
    checkpoint = Checkpoint(weights.parent, "auto")
    hashes = KeptHashes(weights.parents[1] / "cache" / "hashes.json")
    assert checkpoint.fingerprint(hashes) == named(weights)
    (weights.parent / "new").write_bytes(bytes(5 * MIB))
    (weights.parent / "new").replace(weights.parent / name)
    with pytest.raises(OSError, match="changed after its model was loaded"):
        checkpoint.fingerprint(hashes)


def test_copied_checkpoint_has_same_fingerprint(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settle(monkeypatch)
    first = named(weights)
    copy = shutil.copytree(weights.parent, tmp_path / "copy" / "another name")
    assert named(copy / weights.name) == first


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', "\x00"])
def test_damaged_hash_file_is_recomputed(
    weights: Path, monkeypatch: pytest.MonkeyPatch, content: str
):
    settle(monkeypatch)
    first = named(weights)
    kept = weights.parents[1] / "cache" / "hashes.json"
    kept.write_text(content)
    assert named(weights) == first
    assert len(kept.read_text()) > 64


def test_unwritable_hash_folder_only_costs_time(weights: Path, read: list[str]):
    blocked = weights.parents[1] / "cache"
    blocked.write_text("a file where a folder should be")
    assert named(weights) == named(weights)
    assert read.count("model.safetensors") == 2


def test_checkpoint_digest_sees_changes_without_reading_weights(weights: Path, read: list[str]):
    checkpoint = Checkpoint(weights.parent, "auto")
    first = checkpoint.digest()
    assert "model.safetensors" not in read
    assert checkpoint.digest() == first
    assert Checkpoint(weights.parent, "float16").digest() != first
    (weights.parent / "config.json").write_text('{"a": 1}')
    second = checkpoint.digest()
    weights.write_bytes(b"\x01" + bytes(5 * MIB - 1))
    assert len({first, second, checkpoint.digest()}) == 3


def test_program_digest_covers_all_computing_sources():
    """A new kind of source must not be forgotten."""
    found = {
        path
        for folder in COMPUTING
        for path in (PACKAGE / folder).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert {path.suffix for path in found} >= {".py", ".cu", ".cuh"}
    assert found <= set(sources(PACKAGE))


@pytest.mark.parametrize("kind", ["*.py", "*.cu", "*.cuh"])
def test_changed_source_changes_program_and_state_fingerprints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    copy = tmp_path / "vlm_server"
    shutil.copytree(PACKAGE / "runner" / "backends" / "cuda", copy)
    monkeypatch.setattr(vlm_server, "__path__", [str(copy)])
    before = program_digest(), state_fingerprint("a", "b")
    (copy / "notes.txt").write_text("of no account")
    assert (program_digest(), state_fingerprint("a", "b")) == before
    changed = next(copy.glob(kind))
    changed.write_bytes(changed.read_bytes() + b"\n")
    after = program_digest(), state_fingerprint("a", "b")
    assert all(new != old for new, old in zip(after, before, strict=True))


def test_drafter_changes_fingerprint(weights: Path):
    """Its KV is stored with the model's: without it, or with another, that is of no use."""
    drafter = weights.parents[1] / "drafter"
    drafter.mkdir()
    (drafter / "model.safetensors").write_bytes(b"head")
    hashes = KeptHashes(weights.parents[1] / "cache" / "hashes.json")
    checkpoints = [
        Checkpoint(weights.parent, "auto", drafter=folder)
        for folder in (None, drafter, weights.parent)
    ]
    assert len({checkpoint.fingerprint(hashes) for checkpoint in checkpoints}) == 3
    (drafter / "model.safetensors").write_bytes(b"other head")
    with pytest.raises(OSError, match="changed"):
        checkpoints[1].fingerprint(hashes)
