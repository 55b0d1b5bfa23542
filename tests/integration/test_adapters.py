"""Answers by LoRA adapters: those of mlx-vlm's own layers, whatever runs beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_vlm
import numpy as np
import pytest
from mlx.nn import Linear  # type: ignore[attr-defined]
from mlx_vlm import stream_generate
from mlx_vlm.trainer.peft import apply_lora_layers
from msgspec import structs
from safetensors.numpy import load_file, save_file

from tests import tiny_models
from tests.integration.harness import (
    EngineHarness,
    Served,
    ask,
    cached_tokens,
    caches_of,
    load_model,
    new_preparer,
    prompt_of,
)
from tests.integration.oracle import Oracle
from tests.integration.prompts import PROMPTS
from tests.integration.test_compiled_model import new_model
from tests.support.adapters import MLX, as_peft, write_adapter
from tests.tiny_models import cached
from vlm_server.errors import ModelLoadError
from vlm_server.protocol import Failed, Submit
from vlm_server.runner.decode import sequence
from vlm_server.runner.kv.layers import new_layers
from vlm_server.runner.model.adapters import chosen
from vlm_server.runner.model.compiled_model import CompiledModel

FAMILIES = (
    *("qwen3_vl", "qwen3_5", "llama"),
    *(
        pytest.param(name, marks=pytest.mark.whole)
        for name in ("gemma3", "smolvlm", "qwen3_vl_moe", "lfm2")
    ),
)
WHO = ("", "red", "blue")
"""The base and its adapters."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of different ranks and layers, the second in PEFT's layout."""
    return adapters_of(family, tmp_path_factory.mktemp("adapters"))


def adapters_of(family: str, folder: Path, bits: int | None = None) -> dict[str, str]:
    base = cached(family, bits=bits)
    down = {"lfm2": "w2"}.get(family, "down_proj")
    red = ["q_proj", "v_proj"] if "moe" in family else ["q_proj", "v_proj", down]
    write_adapter(base, folder / "red", 1, red)
    write_adapter(base, folder / "blue-mlx", 2, ["k_proj", "q_proj"], rank=8)
    as_peft(folder / "blue-mlx", folder / "blue")
    return {name: str(folder / name) for name in ("red", "blue")}


@pytest.fixture(scope="module")
def served(family: str, folders: Mapping[str, str]) -> Served:
    loaded = load_model(cached(family), adapters=folders)
    return loaded, new_preparer(loaded)


@pytest.fixture(scope="module")
def alone(served: Served) -> dict[str, list[int]]:
    """The answers to all prompts by the base and by each adapter, each request alone."""
    engine = EngineHarness(*served)
    for request in requests(served):
        engine.add(request)
        engine.run()
    return dict(engine.tokens)


def requests(served: Served) -> list[Submit]:
    names = [name for name in PROMPTS if served[0].spec.reads_images or "image" not in name]
    names = [name for name in names if served[0].spec.reads_images or name != "mute"]
    return [
        structs.replace(ask(f"{name} {who}", *PROMPTS[name]), adapter=who)
        for name in names
        for who in WHO
    ]


# ---- equality with mlx-vlm, and with merged weights --------------------------------------


@pytest.mark.parametrize("who", ["red", "blue"])
def test_answers_by_adapter_equal_those_of_mlx_vlms_lora_layers(
    family: str, folders: Mapping[str, str], alone: Mapping[str, list[int]], who: str
):
    """The engine's model with mlx-vlm's own `LoRALinear` in it."""
    loaded = load_model(cached(family))
    mlxs = Path(folders["red"]) if who == "red" else Path(folders["blue"]).with_name("blue-mlx")
    apply_lora_layers(loaded.model, mlxs)
    engine = EngineHarness(loaded, new_preparer(loaded))
    for request in requests((loaded, engine.preparer)):
        if request.adapter == who:
            engine.add(structs.replace(request, adapter=""))
            engine.run()
    assert engine.tokens == {name: alone[name] for name in engine.tokens}
    assert any(alone[name] != alone[name.replace(who, "")] for name in engine.tokens)


def test_adapter_of_layer_that_is_never_called_is_refused(tmp_path: Path):
    """The last layers of gemma3n take keys and values of earlier ones."""
    base = cached("gemma3n")
    write_adapter(base, tmp_path, 1, ["k_proj"])
    with pytest.raises(ModelLoadError, match=r"self_attn\.k_proj, which .* does not call"):
        load_model(base, adapters={"red": str(tmp_path)})
    file = tmp_path / MLX
    tensors = load_file(file)
    untrained = {name: array * 0 for name, array in tensors.items() if name.endswith("lora_b")}
    save_file(tensors | untrained, file)
    assert load_model(base, adapters={"red": str(tmp_path)}).spec.adapters


@pytest.mark.whole
@pytest.mark.parametrize(
    "any_family",
    [
        name
        for name in (*tiny_models.FAMILIES, *tiny_models.TEXT_FAMILIES)
        if name not in ("gemma3n", "qwen3_omni_moe")  # layers without calls; a part of a model
    ],
)
def test_adapter_of_all_layers_answers_as_mlx_vlms_layers(any_family: str, tmp_path: Path):
    """Of all linear layers but a few whose weights mlx-vlm or our fixes read directly."""
    base = cached(any_family)
    write_adapter(base, tmp_path, 1, linear_layers_of(base), rank=2)
    loaded = load_model(base, adapters={"red": str(tmp_path)})
    theirs = load_model(base)
    apply_lora_layers(theirs.model, tmp_path)
    engine = EngineHarness(loaded, new_preparer(loaded))
    oracle = EngineHarness(theirs, new_preparer(theirs))
    names = ("text", "image") if loaded.spec.reads_images else ("text",)
    for name in names:
        request = ask(name, *PROMPTS[name])
        base_answer = engine.answer(structs.replace(request, request_id=f"{name} of base"))
        assert engine.answer(structs.replace(request, adapter="red")) == oracle.answer(request)
        assert engine.tokens[name] != base_answer


def linear_layers_of(base: Path) -> list[str]:
    """The names of the linear layers that an adapter may adapt."""
    loaded = load_model(base)
    prefix = "language_model."
    layers = [
        f"{prefix}{name}"
        for name, module in loaded.language_model.named_modules()
        if isinstance(module, Linear) and re.search(r"\b(layers|blocks|h)\.", name)
    ]
    return [name for name in layers if not re.search(r"\.inner\.|\.indexer\.|experts\.\d", name)]


def test_base_answers_exactly_as_without_adapters(family: str, alone: Mapping[str, list[int]]):
    loaded = load_model(cached(family))
    engine = EngineHarness(loaded, new_preparer(loaded))
    for request in requests((loaded, engine.preparer)):
        if not request.adapter:
            engine.add(request)
            engine.run()
    assert engine.tokens == {name: alone[name] for name in engine.tokens}


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_greedy_tokens_by_adapter_equal_mlx_vlms_generation(
    family: str, folders: Mapping[str, str], served: Served, alone: Mapping[str, list[int]]
):
    model, processor = mlx_vlm.load(str(cached(family)), adapter_path=folders["red"])
    model.set_dtype(mx.float32)
    engine = EngineHarness(*served)
    engine.answer(structs.replace(ask("text red", *PROMPTS["text"]), adapter="red"))
    text = served[0].spec.backend.decode(
        engine.prompts["text red"].token_ids.tolist(), skip_special_tokens=False
    )
    results = list(stream_generate(model, processor, text, max_tokens=10, temperature=0.0))
    assert [int(result.token) for result in results][:10] == alone["text red"]


def test_logits_by_adapter_are_those_of_merged_weights(
    served: Served, folders: Mapping[str, str], family: str
):
    """Within the rounding of float32, in both layouts."""
    loaded, _ = served
    for number, who in enumerate(("red", "blue-mlx"), start=1):
        merged = load_model(cached(family))
        folder = Path(folders["red"]).with_name(who)
        apply_lora_layers(merged.model, folder)
        for module in list(merged.language_model.modules()):
            for name, child in list(module.children().items()):
                if hasattr(child, "lora_a") and hasattr(child, "fuse"):
                    module[name] = child.fuse()
        ids = mx.array([[5, 9, 12, 7, 30]])
        with chosen(mx.array([[number]])):
            ours = loaded.language_model(ids, cache=new_layers(loaded.language_model)).logits
        theirs = merged.language_model(ids, cache=new_layers(merged.language_model)).logits
        loaded.forget_positions()
        np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("family", ["qwen3_vl", "llama"], indirect=True)
def test_adapter_of_quantized_base_answers_as_mlx_vlms_layers(
    family: str, bits: int, is_dense: bool, tmp_path: Path
):
    base = cached(family, bits=bits)
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    limit = None if is_dense else size + size // 8 + (1 << 20)
    folders = adapters_of(family, tmp_path, bits)
    loaded = load_model(base, limit, adapters=folders)
    engine = EngineHarness(loaded, new_preparer(loaded))
    theirs = load_model(base, limit)
    apply_lora_layers(theirs.model, folders["red"])
    oracle = EngineHarness(theirs, new_preparer(theirs))
    for request in requests((loaded, engine.preparer)):
        if request.adapter == "red":
            answer = engine.answer(request)
            assert answer == oracle.answer(structs.replace(request, adapter=""))


# ---- what runs beside an answer ----------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [512, 7])
def test_adapters_and_base_at_once_answer_as_alone(
    served: Served, alone: Mapping[str, list[int]], chunk_tokens: int
):
    engine = EngineHarness(*served, chunk_tokens=chunk_tokens, max_num_seqs=6)
    for request in requests(served):
        engine.add(request)
        engine.step()
    engine.run()
    assert engine.tokens == alone


def test_batched_prefill_of_several_adapters_answers_as_alone(
    served: Served, alone: Mapping[str, list[int]]
):
    engine = EngineHarness(*served, max_prompts_per_prefill=8)
    texts = [each for each in requests(served) if each.request_id.startswith(("text", "long"))]
    for request in texts:
        engine.add(request)
    engine.run()
    assert engine.tokens == {each.request_id: alone[each.request_id] for each in texts}


def test_drafts_are_verified_by_own_adapter(
    served: Served, alone: Mapping[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    engine = EngineHarness(*served, num_draft_tokens=4)
    if not engine.runner._groups._speculation.widths:
        pytest.skip("this family verifies no drafts")
    answers = dict[tuple[int, ...], list[list[int]]]()
    for request in requests(served):
        prompt = prompt_of(served[1], request)
        answers.setdefault(tuple(prompt.token_ids.tolist()), []).append(alone[request.request_id])
    monkeypatch.setattr(sequence, "Drafter", Oracle(answers, 0.3))
    for request in requests(served):
        engine.add(request)
    engine.run()
    tokens = {name: tokens[:10] for name, tokens in engine.tokens.items()}
    assert tokens == alone, "tokens after the last one do not count"


@pytest.mark.parametrize("mixed_step_tokens", [0, 128])
def test_compiled_steps_answer_as_uncompiled_ones(
    served: Served, alone: Mapping[str, list[int]], mixed_step_tokens: int
):
    loaded, preparer = served
    model = new_model(CompiledModel, loaded, mixed_step_tokens)
    engine = EngineHarness(replace(loaded, text=model), preparer, chunk_tokens=16, max_num_seqs=6)
    for request in requests(served):
        engine.add(request)
        engine.step(2)
    engine.run()
    assert engine.tokens == alone
    assert model.can_compile


# ---- caches ------------------------------------------------------------------------------


def test_prefixes_are_cached_apart_and_hits_answer_as_misses(
    served: Served, alone: Mapping[str, list[int]]
):
    engine = EngineHarness(*served, caches=caches_of(served))
    for turn in range(2):
        for request in requests(served):
            name = f"{request.request_id} {turn}"
            engine.add(structs.replace(request, request_id=name))
            engine.run()
            assert engine.tokens[name] == alone[request.request_id]
            if request.request_id.startswith("long"):  # all begin as the template does
                is_cached = cached_tokens(engine, name) > engine.prompts[name].num_tokens // 2
                assert is_cached == bool(turn)


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"], indirect=True)
def test_image_is_encoded_once_for_all_adapters(served: Served):
    engine = EngineHarness(*served, caches=caches_of(served))
    encoded = []
    for who in WHO:
        engine.add(structs.replace(ask(f"image {who}", *PROMPTS["image"]), adapter=who))
        engine.run()
        encoded.append(engine.preparers.num_read[f"image {who}"])
    assert encoded[0] > 0
    assert encoded[1:] == [0, 0]


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_unknown_adapter_fails_its_own_request(served: Served, alone: Mapping[str, list[int]]):
    engine = EngineHarness(*served)
    engine.add(structs.replace(ask("text green", *PROMPTS["text"]), adapter="green"))
    engine.add(ask("text ", *PROMPTS["text"]))
    engine.run()
    end = engine.ends["text green"]
    assert isinstance(end, Failed)
    assert "green" in end.message
    assert engine.tokens == {"text ": alone["text "]}
