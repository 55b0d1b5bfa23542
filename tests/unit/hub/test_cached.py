"""The files that `rm` removes from the hub's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from vlm_server.hub.cached import removal
from vlm_server.hub.find import find_unfinished
from vlm_server.hub.names import HubName

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    for repo in ("org--model", "org--other"):
        add(folder / f"models--{repo}", FIRST, "main", {"config.json": "1" * 40, "w": "2" * 64})
    add(folder / "models--org--model", SECOND, "v2", {"config.json": "3" * 40, "w": "2" * 64})
    return folder


def add(repository: Path, commit: str, ref: str, files: dict[str, str]) -> None:
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    for path, blob in files.items():
        (repository / "blobs" / blob).write_bytes(blob.encode())
        (snapshot / path).symlink_to(Path("../../blobs") / blob)


def there(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if not path.is_dir()}


def test_removal_of_model_includes_all_its_revisions(cache: Path) -> None:
    others = {path for path in there(cache) if "other" in path}
    plan = removal(HubName("org/model"))
    assert plan is not None
    assert plan.paths == (cache / "models--org--model",)
    assert plan.size_bytes == 40 + 64 + 40
    assert there(cache) > others
    plan.execute()
    assert there(cache) == others


@pytest.mark.parametrize("revision", ["v2", SECOND])
def test_removal_of_revision_keeps_shared_blobs(cache: Path, revision: str) -> None:
    before = there(cache)
    plan = removal(HubName("org/model", revision))
    assert plan is not None
    assert plan.size_bytes == 40
    plan.execute()
    gone = before - there(cache)
    names = {path.removeprefix("models--org--model/") for path in gone}
    assert names == {
        *(f"snapshots/{SECOND}/config.json", f"snapshots/{SECOND}/w"),
        *(f"blobs/{'3' * 40}", "refs/v2"),
    }


def test_unknown_model_or_revision_has_no_removal_plan(cache: Path) -> None:
    assert removal(HubName("org/none")) is None
    assert removal(HubName("org/model", "v3")) is None


def test_unfinished_download_is_listed_and_removed(cache: Path) -> None:
    others = there(cache)
    folder = cache / "models--org--half"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs/abc.incomplete").write_bytes(b"x" * 1000)
    assert [one.name for one in find_unfinished()] == ["org/half"]
    assert removal(HubName("org/half", "main")) is None
    plan = removal(HubName("org/half"))
    assert plan is not None
    assert plan.size_bytes >= 1000
    plan.execute()
    assert there(cache) == others


def test_missing_hub_cache_lists_no_models_or_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert removal(HubName("org/model")) is None
    assert find_unfinished() == []
