"""The folder and the name of a checkpoint, by its name, path or revision."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from vlm_server.errors import ConfigError
from vlm_server.hub import find, layout
from vlm_server.hub.find import LocalCheckpoint

NAME = "org/model-4bit"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checkpoint(folder: Path, *weights: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3_vl"}')
    for name in weights or ("model.safetensors",):
        (folder / name).touch()
    return folder


def snapshot(home: Path, commit: str = FIRST, ref: str | None = "main", *weights: str) -> Path:
    repository = home / "hub/models--org--model-4bit"
    if ref:
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return checkpoint(repository / "snapshots" / commit, *weights)


def test_unreadable_paths_do_not_hide_checkpoints(home: Path) -> None:
    """The system refuses a name that is too long in the same way as another user's folder."""
    found = checkpoint(home / "disk" / NAME)
    (home / "disk/link").symlink_to("x" * 300)
    (home / "disk/lost+found").mkdir()
    (home / "disk/lost+found/config.json").symlink_to("x" * 300)
    paths = (str(home / "disk"),)
    assert [one.folder for one in find.find_all(paths)] == [found]
    assert find.find(NAME, paths) == LocalCheckpoint(found, NAME, "search path")


def test_existing_folder_wins_over_cached_models(home: Path) -> None:
    snapshot(home)
    folder = checkpoint(home / NAME)
    assert find.find(NAME) == LocalCheckpoint(folder, "model-4bit", "folder")
    assert find.find(f"./{NAME}") == LocalCheckpoint(folder, "model-4bit", "folder")


def test_hub_cache_wins_over_lm_studio_and_search_paths(home: Path) -> None:
    searched = checkpoint(home / "disk" / NAME)
    paths = (str(home / "disk"),)
    assert find.find(NAME) is None
    assert find.find(NAME, paths) == LocalCheckpoint(searched, NAME, "search path")
    studio = checkpoint(home / ".lmstudio/models" / NAME)
    assert find.find(NAME, paths) == LocalCheckpoint(studio, NAME, "LM Studio")
    cached = snapshot(home)
    assert find.find(NAME, paths) == LocalCheckpoint(cached, NAME, "hub cache")
    assert [found.folder for found in find.find_all(paths)] == [cached, studio, searched]


def test_configured_lm_studio_folder_is_searched(home: Path) -> None:
    studio = checkpoint(home / "big disk" / NAME)
    (home / ".lmstudio").mkdir()
    settings = {"downloadsFolder": str(home / "big disk")}
    (home / ".lmstudio/settings.json").write_text(json.dumps(settings))
    assert find.find(NAME) == LocalCheckpoint(studio, NAME, "LM Studio")


def test_cached_model_has_one_name_for_all_references(home: Path) -> None:
    folder = snapshot(home)
    for text in (NAME, f"{NAME}@main", f"{NAME}@{FIRST}", str(folder), str(folder.parent.parent)):
        found = find.find(text)
        assert found is not None
        assert (found.folder, found.name) == (folder, NAME)


def test_lm_studio_model_by_path_has_its_organization(home: Path) -> None:
    folder = checkpoint(home / ".lmstudio/models" / NAME)
    assert find.find(str(folder)) == LocalCheckpoint(folder, NAME, "folder")


def test_name_in_other_case_finds_listed_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that folds case: there is one folder, and other letters find it too."""
    folder, listed = snapshot(home), Path.iterdir
    (home / "hub/models--Org--Model-4bit").symlink_to(home / "hub/models--org--model-4bit")
    monkeypatch.setattr(
        Path, "iterdir", lambda path: (each for each in listed(path) if not each.is_symlink())
    )
    assert (
        find.find("Org/Model-4bit") == find.find(NAME) == LocalCheckpoint(folder, NAME, "hub cache")
    )


def test_revisions_of_model_are_found_separately(home: Path) -> None:
    first, second = snapshot(home), snapshot(home, SECOND, "v2")
    found = {text: find.find(f"{NAME}@{text}") for text in ("main", "v2", SECOND, "v3")}
    assert found["main"] == LocalCheckpoint(first, NAME, "hub cache")
    assert found["v2"] == found[SECOND] == LocalCheckpoint(second, NAME, "hub cache")
    assert found["v3"] is None


def test_single_snapshot_is_found_without_main_branch(home: Path) -> None:
    folder = snapshot(home, ref=None)
    assert find.find(NAME) == LocalCheckpoint(folder, NAME, "hub cache")
    snapshot(home, SECOND, None)
    assert find.find(NAME) is None


def test_unfinished_download_is_not_found(home: Path) -> None:
    shards = ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    folder = snapshot(home, FIRST, "main", *shards)
    assert find.find(NAME) is None
    (folder / "model-00002-of-00003.safetensors").touch()
    assert find.find(NAME) is not None
    index = {"weight_map": {"a": "model-00001-of-00003.safetensors", "b": "more.safetensors"}}
    (folder / layout.INDEX).write_text(json.dumps(index))
    assert find.find(NAME) is None


def test_name_without_organization_must_be_unambiguous(home: Path) -> None:
    assert find.find("model-4bit") is None
    folder = checkpoint(home / "disk/model-4bit")
    paths = (str(home / "disk"), str(home / "other"))
    assert find.find("model-4bit", paths) == LocalCheckpoint(folder, "model-4bit", "search path")
    checkpoint(home / "other" / NAME)
    with pytest.raises(ConfigError, match="several"):
        find.find("model-4bit", paths)


def test_search_path_may_be_another_hub_cache(home: Path) -> None:
    (home / "hub").mkdir()
    folder = snapshot(home / "external")
    found = find.find(NAME, (str(home / "external/hub"),))
    assert found == LocalCheckpoint(folder, NAME, "search path")


def test_macos_metadata_files_are_no_weights(home: Path) -> None:
    folder = checkpoint(home / "x", "._model.safetensors")
    assert layout.weight_files(folder) == []
    assert not layout.is_complete(folder)


def test_download_selects_only_files_of_loader() -> None:
    read = ["config.json", "model.safetensors", "chat_template.jinja", "merges.txt", "x.model"]
    others = ["README.md", "modeling.py", "onnx/model.json", "a.gguf", "consolidated.safetensors"]
    others += [".gitattributes", "._config.json", "x.bin", "original/config.json"]
    assert all(map(layout.is_read, read))
    assert not any(map(layout.is_read, others))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "4bit"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({}, ""),
    ],
)
def test_quantization_is_described_by_config(config: dict[str, object], words: str) -> None:
    assert layout.quantization(config) == words


def test_user_without_home_finds_cached_models(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user has none, who is in no table of users."""
    cached = snapshot(home)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    assert [one.folder for one in find.find_all()] == [cached]
