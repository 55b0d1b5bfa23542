"""Faulty adapters are refused with a reason, and adapters beside a model are ignored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.harness import EngineHarness, ask, load_model, new_preparer
from tests.integration.prompts import PROMPTS
from tests.support.adapters import CONFIG, MLX, PEFT, as_peft, write_adapter
from tests.tiny_models import build, cached
from vlm_server.errors import ModelLoadError
from vlm_server.hub.examination import ExaminationRequest
from vlm_server.runner.loading.facts import examine
from vlm_server.settings import GIB, MemorySettings, ModelSettings

FAMILY = "qwen3_vl"
LAYER = "language_model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(cached(FAMILY), tmp_path_factory.mktemp("adapter"), 1, ["q_proj"])


def load_with(folder: Path, limit_bytes: int | None = None) -> None:
    load_model(cached(FAMILY), limit_bytes, adapters={"red": str(folder)})


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


def change_parameters(folder: Path, **fields: Any) -> None:
    parameters = json.loads((folder / CONFIG).read_text())["lora_parameters"]
    change_config(folder, lora_parameters=parameters | fields)


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, file)


def first(tensors: dict[str, Any]) -> str:
    return f"{LAYER}.lora_a"


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), "no adapter_config.json"),
    "no weights": (lambda f: (f / MLX).unlink(), "has no adapters.safetensors"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), "can't read"),
    "deep JSON": (lambda f: (f / CONFIG).write_text("[" * 100_000), "can't read"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "rank is None"),
    "cut short": (lambda f: (f / MLX).write_bytes((f / MLX).read_bytes()[:-5]), "no safetensors"),
    "a pickle": (lambda f: (f / MLX).write_bytes(b"\x80\x04cposix\nsystem\n"), "no safetensors"),
    "DoRA": (lambda f: change_config(f, fine_tune_type="dora"), "only 'lora'"),
    "full": (lambda f: change_config(f, fine_tune_type="full"), "only 'lora'"),
    "rank 0": (lambda f: change_parameters(f, rank=0), "rank is 0"),
    "huge rank": (lambda f: change_parameters(f, rank=10**400), "rank is 1000"),
    "other rank": (lambda f: change_parameters(f, rank=10**6), "says rank 1000000"),
    "rank of text": (lambda f: change_parameters(f, rank="4"), "rank is '4'"),
    "endless scale": (lambda f: change_parameters(f, scale=float("inf")), "scale is inf"),
    "NaN scale": (lambda f: change_parameters(f, scale=float("nan")), "scale is nan"),
    "no scale": (lambda f: change_config(f, lora_parameters={"rank": 4}), "scale is None"),
    "quantized base": (
        lambda f: change_config(f, base_quantization={LAYER: {"bits": 4, "group_size": 32}}),
        "quantized as",
    ),
    "NaN": (
        lambda f: change_tensors(f, lambda t: t[first(t)].__setitem__((0, 0), np.nan)),
        "not finite",
    ),
    "one side": (lambda f: change_tensors(f, lambda t: t.pop(first(t))), "do not fit"),
    "no matrix": (
        lambda f: change_tensors(f, lambda t: t.update({first(t): t[first(t)][0]})),
        "is no matrix",
    ),
    "other width": (
        lambda f: change_tensors(f, lambda t: t.update({first(t): t[first(t)][:-1]})),
        "another base",
    ),
    "integers": (
        lambda f: change_tensors(f, lambda t: t.update({first(t): t[first(t)].astype(np.int32)})),
        "type I32",
    ),
    "magnitudes": (
        lambda f: change_tensors(f, lambda t: t.update({f"{LAYER}.m": np.zeros(4, np.float32)})),
        "DoRA",
    ),
    "whole weights": (
        lambda f: change_tensors(f, lambda t: t.update({f"{LAYER}.bias": np.zeros(4, "f")})),
        "weights of its own",
    ),
    **{
        f"layer {name}": (
            lambda f, name=name: change_tensors(
                f,
                lambda t: t.update(
                    {f"{name}.{s}": t.pop(f"{LAYER}.{s}") for s in ("lora_a", "lora_b")}
                ),
            ),
            message,
        )
        for name, message in (
            ("language_model.model.layers.9.self_attn.q_proj", "another base"),
            ("language_model.model.layers.0.self_attn", "no linear layer"),
            ("model.layers.1.self_attn.q_proj", "names a layer twice"),
            ("language_model.lm_head", "only linear layers of the language model"),
            ("vision_tower.blocks.0.attn.qkv", "only linear layers of the language model"),
            ("vision_tower.encoder.layers.0.self_attn.q_proj", "only linear layers"),
            ("../../../layers.0.self_attn.q_proj", "only linear layers"),
            ("model.layers.0.__class__", "another base"),
        )
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_adapter_is_refused_with_reason(fault: str, adapter: Path, tmp_path: Path):
    folder = Path(shutil.copytree(adapter, tmp_path / "red"))
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_with(folder)
    assert "`red`" in str(caught.value)
    assert len(str(caught.value)) < 700
    examination = examine(
        ExaminationRequest(
            ModelSettings(path=str(cached(FAMILY))),
            MemorySettings(GIB),
            adapters={"red": str(folder)},
        )
    )
    assert examination.refusal == str(caught.value), "it is known before loading"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "only 'LORA'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"something_new": 1}, "something_new"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"r": 2.5}, "r is 2.5"),
        ({"r": 5}, "says rank 5"),
    ],
)
def test_peft_adapter_that_does_more_is_refused(
    fields: dict[str, Any], message: str, adapter: Path, tmp_path: Path
):
    with pytest.raises(ModelLoadError, match=message):
        load_with(as_peft(adapter, tmp_path, **fields))


@pytest.mark.parametrize(
    ("prefix", "is_known"),
    [
        ("model.", True),
        ("model.language_model.", True),
        ("language_model.model.", True),
        ("model.text_model.", True),
        ("thinker.model.", True),
        ("model.visual.", False),
        ("vision_tower.vision_model.encoder.", False),
        ("model.vision_model.encoder.", False),
        ("audio_tower.", False),
    ],
)
def test_peft_names_of_language_model_are_known_in_all_spellings(
    prefix: str, is_known: bool, adapter: Path, tmp_path: Path
):
    """transformers had several; a vision tower's layers may be called the same otherwise."""
    folder, usual = as_peft(adapter, tmp_path), "base_model.model.model.language_model."

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(usual, f"base_model.model.{prefix}")] = tensors.pop(name)

    change_tensors(folder, rename)
    refused = pytest.raises(ModelLoadError, match="only linear layers of the language model")
    with nullcontext() if is_known else refused:
        load_with(folder)


def test_pickled_peft_adapter_is_refused(adapter: Path, tmp_path: Path):
    folder = as_peft(adapter, tmp_path)
    (folder / PEFT).rename(folder / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"has no adapter_model\.safetensors"):
        load_with(folder)


def test_adapters_count_towards_memory(adapter: Path, tmp_path: Path):
    size = load_model(cached(FAMILY)).size_bytes
    with pytest.raises(ModelLoadError, match="do not fit"):
        load_with(adapter, size + 1)
    loaded = load_model(cached(FAMILY), adapters={"red": str(adapter)})
    assert loaded.size_bytes > size


def test_scale_with_rank_stabilization_is_alpha_by_root_of_rank(adapter: Path, tmp_path: Path):
    plain = as_peft(adapter, tmp_path / "plain", lora_alpha=8)
    stable = as_peft(adapter, tmp_path / "stable", lora_alpha=4, use_rslora=True)
    folders = {"plain": str(plain), "stable": str(stable)}
    loaded = load_model(cached(FAMILY), adapters=folders)
    layer = loaded.language_model.layers[0].self_attn.q_proj
    assert (layer.lora_b[:4] == layer.lora_b[4:]).all(), "8 / 4 = 4 / sqrt(4)"


def test_former_layout_of_mlx_vlm_is_read(adapter: Path, tmp_path: Path):
    tensors = load_file(adapter / MLX)
    names = {".lora_a": ".A", ".lora_b": ".B"}
    save_file(
        {name[:-7] + names[name[-7:]]: array for name, array in tensors.items()}, tmp_path / MLX
    )
    (tmp_path / CONFIG).write_text(json.dumps({"rank": 4, "alpha": 6.0, "dropout": 0.1}))
    loaded = load_model(cached(FAMILY), adapters={"old": str(tmp_path), "new": str(adapter)})
    layer = loaded.language_model.layers[0].self_attn.q_proj
    assert (layer.lora_b[:4] == layer.lora_b[4:]).all()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_adapter_beside_whole_weights_changes_nothing(
    is_damaged: bool, adapter: Path, tmp_path: Path
):
    folder = build(FAMILY, tmp_path / "model")
    shutil.copy(adapter / CONFIG, folder)
    for name in (MLX, PEFT, "0000100_adapters.safetensors"):
        shutil.copy(adapter / MLX, folder / name)
    if is_damaged:
        (folder / MLX).write_bytes(b"?")
        (folder / CONFIG).write_text("{")
    answers = []
    for path in (folder, cached(FAMILY)):
        loaded = load_model(path)
        engine = EngineHarness(loaded, new_preparer(loaded))
        answers.append(engine.answer(ask("text", *PROMPTS["text"])))
    assert answers[0] == answers[1]
