"""No file of a checkpoint can make its code run."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.checkpoint_files import edit_json
from tests.integration.harness import load_model, new_preparer
from tests.support.planted_code import Planted
from tests.tiny_models import build
from vlm_server.errors import ModelLoadError

EVIL = "evil.Evil"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that planted code makes."""
    return tmp_path / "mark"


@pytest.fixture
def checkpoint(tmp_path: Path, mark: Path) -> Path:
    """A checkpoint with modules under many names that leave the mark when they run."""
    folder = build("qwen2_5_vl", tmp_path / "model")
    code = f"open({str(mark)!r}, 'w').close()\nclass Evil:\n    pass\n"
    for name in ("evil", "modeling_evil", "tokenization_evil", "processing_evil", "custom_model"):
        (folder / f"{name}.py").write_text(code)
    for name in ("__init__", "queue", "msgspec", "numpy", "jinja2", "llguidance", "sitecustomize"):
        (folder / f"{name}.py").write_text(code)
    return folder


def load_anyhow(folder: Path) -> str:
    """Load a checkpoint and build its preparer; returns the refusal, or "" if it loads."""
    try:
        new_preparer(load_model(folder))
    except ModelLoadError as error:
        return str(error)
    return ""


AUTO_MAP = {"AutoConfig": EVIL, "AutoModel": EVIL, "AutoTokenizer": [EVIL, EVIL]}
AUTO_MAP |= {"AutoProcessor": EVIL, "AutoImageProcessor": EVIL, "AutoVideoProcessor": EVIL}


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "tokenizer_config.json",
        "processor_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "generation_config.json",
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": AUTO_MAP, "trust_remote_code": True},
        {"auto_map": AUTO_MAP, "tokenizer_class": "Evil", "processor_class": "Evil"},
        {"image_processor_type": "Evil", "video_processor_type": "Evil", "auto_map": AUTO_MAP},
        {"custom_generate": "evil.py", "custom_model": "evil.py", "architectures": ["Evil"]},
        {"tokenizer_class": "os.system", "processor_class": "subprocess.Popen"},
    ],
    ids=["auto_map", "classes", "processors", "custom", "modules"],
)
def test_code_named_in_config_files_never_runs(
    checkpoint: Path, mark: Path, file: str, changes: dict[str, Any]
):
    edit_json(checkpoint / file, **changes)
    load_anyhow(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("model_type", ["evil", "..evil", "../model/evil", "evil.Evil", "os"])
def test_model_type_never_imports_checkpoint_module(
    checkpoint: Path, mark: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(checkpoint)
    edit_json(checkpoint / "config.json", model_type=model_type)
    assert load_anyhow(checkpoint)
    assert not mark.exists()


def test_checkpoint_code_in_working_directory_never_runs(
    checkpoint: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(checkpoint)
    assert not load_anyhow(Path())
    assert not mark.exists()


def pickled_array(mark: Path) -> bytes:
    array = np.empty(1, dtype=object)
    array[0] = Planted(mark)
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def weights_with_code(name: str, mark: Path) -> bytes:
    """Weights of the format that `name` says, with an object that leaves the mark."""
    if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")):
        return pickle.dumps(Planted(mark))
    if name.endswith(".npy"):
        return pickled_array(mark)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("weight.npy", pickled_array(mark))
        file.writestr("data.pkl", pickle.dumps(Planted(mark)))
    return archive.getvalue()


WEIGHTS = ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.npz", "weights.npy"]
WEIGHTS += ["model.ckpt", "adapters.npz", "optimizer.pkl"]


def test_unreferenced_pickled_weights_are_not_read(checkpoint: Path, mark: Path):
    for name in WEIGHTS:
        (checkpoint / name).write_bytes(weights_with_code(name, mark))
    assert not load_anyhow(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("is_alone", [True, False])
def test_weight_index_naming_pickled_weights_is_refused(
    checkpoint: Path, mark: Path, name: str, is_alone: bool
):
    (checkpoint / name).write_bytes(weights_with_code(name, mark))
    if is_alone:
        (checkpoint / "model.safetensors").unlink()
    edit_json(checkpoint / "model.safetensors.index.json", weight_map={"x": name})
    assert load_anyhow(checkpoint)
    assert not mark.exists()


def test_pickled_weights_named_safetensors_are_refused(checkpoint: Path, mark: Path):
    (checkpoint / "model.safetensors").write_bytes(weights_with_code("weights.npz", mark))
    assert load_anyhow(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors"]
)
def test_weight_index_with_outside_path_is_refused(checkpoint: Path, name: str):
    """A shard with a data type that mlx does not know would even be written to."""
    (checkpoint.parent / "outside.safetensors").write_bytes(
        (checkpoint / "model.safetensors").read_bytes()
    )
    edit_json(checkpoint / "model.safetensors.index.json", weight_map={"x": name})
    assert "no shard" in load_anyhow(checkpoint)


@pytest.mark.parametrize("key", ["chat_template", "chat_template.jinja"])
def test_chat_template_runs_in_sandbox(checkpoint: Path, mark: Path, key: str):
    source = (
        "{% for name in ['lipsum', 'cycler', 'joiner', 'namespace', 'dict', 'range'] %}{% endfor %}"
        f"{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}"
        f"{{{{ namespace.__init__.__globals__['sys'].modules['os'].system('touch {mark}') }}}}"
    )
    if key == "chat_template":
        edit_json(checkpoint / "tokenizer_config.json", chat_template=source)
    else:
        (checkpoint / key).write_text(source)
    load_anyhow(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["list", "function"])
def test_non_text_chat_template_loads_or_is_refused_cleanly(checkpoint: Path, name: str):
    template: Any = {"list": [{"name": "x", "template": "{{ 1 }}"}], "function": 5}[name]
    edit_json(checkpoint / "tokenizer_config.json", chat_template=template)
    for file in checkpoint.glob("chat_template*"):
        file.unlink()
    load_anyhow(checkpoint)
