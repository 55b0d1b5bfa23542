"""Folders that are no checkpoint get a one-line error with a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vlm_server.hub.layout import (
    fault_of,
    fault_of_names,
    is_read,
    missing_files_of,
    read_weight_files,
    visible_files,
)


def gguf_file(folder: Path) -> Path:
    path = folder / "model-Q4_K_M.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    return path


def ollama_blob(folder: Path) -> Path:
    path = folder / "sha256-aeda25e63ebd"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    return path


def gguf_folder(folder: Path) -> Path:
    gguf_file(folder)
    return folder


def lm_studio(folder: Path) -> Path:
    (folder / "publisher" / "model").mkdir(parents=True)
    gguf_file(folder / "publisher" / "model")
    return folder


def ollama_store(folder: Path) -> Path:
    (folder / "manifests").mkdir()
    (folder / "blobs").mkdir()
    ollama_blob(folder / "blobs")
    return folder


def adapter(folder: Path) -> Path:
    base = {"base_model_name_or_path": "some/base", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(base))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def adapter_of_mlx(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text('{"rank": 8}')
    (folder / "adapters.safetensors").write_bytes(b"")
    return folder


def pickles(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    return folder


def onnx(folder: Path) -> Path:
    (folder / "onnx").mkdir()
    return folder


def diffusers(folder: Path) -> Path:
    (folder / "model_index.json").write_text("{}")
    return folder


def another_file(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (gguf_file, ("GGUF", "llama.cpp", "safetensors", "mlx-community")),
        (ollama_blob, ("GGUF", "Ollama", "mlx-community")),
        (gguf_folder, ("GGUF", "mlx-community")),
        (lm_studio, ("GGUF", "LM Studio")),
        (ollama_store, ("Ollama's store", "mlx-community")),
        (adapter, ("LoRA", "some/base", "[models.NAME]")),
        (adapter_of_mlx, ("LoRA", "[models.NAME]")),
        (pickles, ("pickles", "save_pretrained")),
        (onnx, ("ONNX",)),
        (diffusers, ("diffusers",)),
        (another_file, ("is a file", "folder")),
    ],
)
def test_invalid_checkpoint_error_names_its_kind_and_remedy(
    tmp_path: Path, make: Callable[[Path], Path], words: tuple[str, ...]
):
    path = make(tmp_path)
    fault = fault_of(path)
    assert fault is not None
    assert str(path) in fault
    assert "\n" not in fault
    assert all(word in fault for word in words)


def test_complete_checkpoint_has_no_fault(tmp_path: Path):
    """Also one with an adapter or a GGUF beside it, and one whose files are not there yet."""
    assert fault_of(tmp_path) is None
    assert fault_of(tmp_path / "nothing") is None
    (tmp_path / "model.safetensors").write_bytes(b"")
    gguf_file(tmp_path)
    adapter(tmp_path)
    assert fault_of(tmp_path) is None


def test_adapter_is_no_part_of_checkpoint_beside_it(tmp_path: Path):
    for name in ("model.safetensors", "adapters.safetensors", "0000100_adapters.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in read_weight_files(tmp_path)] == ["model.safetensors"]
    assert [is_read(name) for name in ("adapter_config.json", "adapter_model.safetensors")] == [
        False,
        False,
    ]


def test_hidden_files_do_not_count_as_checkpoint_files(tmp_path: Path):
    for name in ("b.json", "a.json", "._a.json", ".DS_Store"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in visible_files(tmp_path)] == ["a.json", "b.json"]
    assert [path.name for path in visible_files(tmp_path, "*.json")] == ["a.json", "b.json"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["config.json", "model.gguf"], "GGUF"),
        (["config.json", "Q4/model.gguf"], "GGUF"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter"),
        (["config.json", "pytorch_model.bin"], "pickles"),
        (["config.json", "onnx/model.onnx"], "ONNX"),
    ],
)
def test_fault_is_found_from_file_names_alone(names: list[str], words: str):
    assert words in str(fault_of_names(names))


def test_missing_config_or_weights_are_named():
    assert "no config.json" in str(missing_files_of(["README.md"]))
    assert "no *.safetensors" in str(missing_files_of(["config.json", "._model.safetensors"]))
    whole = ["config.json", "model.safetensors", "a.gguf", "onnx/model.onnx"]
    assert fault_of_names(whole) is None
    assert missing_files_of(whole) is None
