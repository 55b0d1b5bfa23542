"""A model that is run by compiled graphs gives the answers that it gives without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn import Linear
from mlx_vlm.models.cache import KVCache, make_prompt_cache

from tests.integration.harness import Engine, ask, conversation, load_model
from tests.integration.test_caches import caches_of
from tests.integration.test_families import LONGER, PROMPTS, asked
from tests.integration.test_speculation import Oracle
from tests.tiny_models.fixtures import TinyModel
from tests.tiny_models.pictures import picture
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.protocol import SamplingParams
from vlm_server.runner.cuda import kernels
from vlm_server.runner.cuda.few_rows import SharedProduct, use_few_rows_kernels
from vlm_server.runner.device.device import Device, DeviceKind
from vlm_server.runner.model.load import LoadedModel
from vlm_server.runner.text import decode_batch
from vlm_server.runner.text.attention import ModelAttention
from vlm_server.runner.text.compiled_model import CompiledModel
from vlm_server.runner.text.text_model import TextModel
from vlm_server.runner.vision.grids import Grid
from vlm_server.runner.vision.towers import FrameTower

Served = tuple[LoadedModel, MultimodalPreparer]
Load = Callable[[str], Served]

CANT_BE_COMPILED = ("glm4v", "glm4v_moe", "paddleocr_vl", "qwen3_omni_moe")
"""They look at values of arrays while they build a step."""


class Compiled(CompiledModel):
    """Counts what it was asked, and did."""

    num_steps = 0
    chunks: list[int]

    def step(self, *arguments: Any) -> mx.array | None:
        logits = super().step(*arguments)
        self.num_steps += logits is not None
        return logits

    def prefill(self, token_ids: mx.array, *arguments: Any) -> mx.array | None:
        logits = super().prefill(token_ids, *arguments)
        if logits is not None:
            self.chunks.append(token_ids.shape[1])
        return logits


def compiled(served: Served, **limits: Any) -> tuple[Engine, Compiled]:
    """An engine whose model is compiled, and that."""
    loaded, preparer = served
    model = Compiled(loaded.language_model, loaded.attention, loaded.decode_positions, (4,))
    model.chunks = []
    text = TextModel(loaded.language_model, loaded.attention, model)
    return Engine(replace(loaded, text=text), preparer, **limits), model


def appends_only(loaded: LoadedModel) -> bool:
    return all(type(layer) is KVCache for layer in make_prompt_cache(loaded.language_model))


def run_all(engine: Engine, params: SamplingParams, stagger: int) -> Mapping[str, list[int]]:
    for name in PROMPTS:
        engine.add(asked(name, params))
        engine.step(stagger)
    engine.run()
    return engine.tokens


@pytest.mark.parametrize("stagger", [0, 4])
def test_answers_are_those_without(served: Served, stagger: int):
    engine, model = compiled(served)
    assert run_all(engine, LONGER, stagger) == run_all(Engine(*served), LONGER, 0)
    is_compiled = appends_only(served[0]) and served[0].family.name not in CANT_BE_COMPILED
    assert bool(model.num_steps) == is_compiled
    assert model.works == (served[0].family.name not in CANT_BE_COMPILED)


@pytest.fixture(params=["qwen2_5_vl", "smolvlm", "llava"])
def some(request: pytest.FixtureRequest, load_tiny: Load) -> Served:
    """Families with M-RoPE, with tiles, and with heads that share no keys."""
    return load_tiny(request.param)


@pytest.mark.parametrize("rate", [0.0, 0.5], ids=["right", "mixed"])
def test_drafts_are_verified(some: Served, monkeypatch: pytest.MonkeyPatch, rate: float):
    plain = Engine(*some)
    run_all(plain, LONGER, 0)
    answers = {
        tuple(plain.prompts[name].token_ids.tolist()): [tokens]
        for name, tokens in plain.tokens.items()
    }
    monkeypatch.setattr(decode_batch, "Drafter", Oracle(answers, rate))
    engine, model = compiled(some, num_draft_tokens=7)
    found = run_all(engine, LONGER, 2)
    assert {name: tokens[: LONGER.max_tokens] for name, tokens in found.items()} == plain.tokens
    assert engine.scheduler.read().counts.spec.num_drafts > 0
    assert model.num_steps


def test_buffers_grow(some: Served):
    params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    engines = compiled(some)[0], Engine(*some)
    for engine in engines:
        engine.add(asked("text", params))
        engine.step(200)
        engine.add(asked("long", params))
        engine.run()
    assert engines[0].tokens == engines[1].tokens
    assert len(engines[0].tokens["text"]) == 300


def test_choices_and_aborts(some: Served):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=3)
    engines = compiled(some)[0], Engine(*some)
    for engine in engines:
        engine.add(asked("text", params))
        engine.add(asked("long", LONGER))
        engine.step(8)
        engine.abort("long")
        engine.add(asked("picture", LONGER))
        engine.run()
    first, second = (
        {seq: tokens for seq, tokens in each.seqs.items() if seq.request_id != "long"}
        for each in engines
    )
    assert first == second
    assert len(first) == 4


def test_what_is_new_of_a_prompt_is_read_by_a_graph(some: Served):
    image = picture(1)
    first = ask("first", image, "What is this?")
    again = ask("again", image, "What is this?")
    other = ask("other", image, "And which colour has it?")
    turns = ("user", (image, "What is this?")), ("assistant", ("It.",)), ("user", ("Sure?",))
    engine, model = compiled(some, caches=caches_of(some))
    plain = Engine(*some, caches=caches_of(some))
    for submit in (first, again, other, conversation("next", *turns)):
        assert engine.answer(submit) == plain.answer(submit)
    assert len(model.chunks) >= 3  # the first finds no buffers to learn from
    assert 1 in model.chunks
    assert max(model.chunks) > 1


def test_a_model_that_cannot_be_compiled_is_run_without(load_tiny: Load):
    served = load_tiny("paddleocr_vl")
    engine, model = compiled(served)
    assert engine.answer(asked("text")) == Engine(*served).answer(asked("text"))
    assert not model.works
    assert not model.plan_next()


class Broken:
    """An attention whose kernel can't be compiled, which is found out when it runs."""

    appends_in_place = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def takes(self, *arguments: Any) -> bool:
        return bool(self.inner.takes(*arguments))

    def __call__(self, *arguments: Any) -> mx.array:
        made: mx.array = self.inner(*arguments)
        return made

    def within(self, queries: mx.array, *_: Any) -> mx.array:
        return mx.linalg.inv(mx.zeros((*queries.shape[:-1], 1, 1)), stream=mx.cpu).reshape(
            *queries.shape[:-1], 1
        ) * mx.ones(queries.shape)

    def plan_next(self) -> bool:
        return False


def test_kernels_that_fail_when_they_run_are_left_alone(load_tiny: Load):
    loaded, preparer = load_tiny("qwen2_5_vl")
    attention = ModelAttention(loaded.language_model, Broken(loaded.attention.attention))
    model = CompiledModel(loaded.language_model, attention, loaded.decode_positions, (4,))
    text = TextModel(loaded.language_model, attention, model)
    engine = Engine(replace(loaded, text=text), preparer)
    assert engine.answer(asked("text")) == Engine(loaded, preparer).answer(asked("text"))
    assert not model.works


@pytest.mark.skipif(mx.cuda.is_available(), reason="asks where there is no CUDA GPU")
def test_kernels_are_not_used_where_they_cannot_be():
    assert not kernels.can_be_used()


# ---- layers with one input -----------------------------------------------------------


def multiply(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    product = x @ weight.T
    return product if bias is None else product + bias


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_few_rows_are_multiplied_as_before(tiny_model: TinyModel, family: str):
    loaded = load_model(tiny_model(family))
    language_model = loaded.language_model
    language_model.set_dtype(mx.bfloat16)
    few, many = mx.array([[1, 2, 3]]), mx.array([[1, 2, 3] * 20])

    def logits() -> list[mx.array]:
        made = []
        for tokens in (few, many):
            made.append(language_model(tokens).logits)
            loaded.forget_positions()
        return made

    expected = logits()
    before = sum(layer.weight.nbytes for layer in language_model.modules() if "weight" in layer)
    use_few_rows_kernels(language_model, multiply)
    modules = language_model.modules()
    assert not any(type(layer) is Linear for layer in modules)
    assert sum(isinstance(getattr(m, "product", None), SharedProduct) for m in modules) >= 5
    assert sum(layer.weight.nbytes for layer in modules if "weight" in layer) == before
    for found, wanted in zip(logits(), expected, strict=True):
        assert mx.abs(found - wanted).max() <= 0.1 * mx.abs(wanted).max()


def test_a_layer_with_an_input_of_its_own_gets_its_own():
    layers = [Linear(64, size, bias=False) for size in (8, 4)]
    for layer in layers:
        layer.set_dtype(mx.bfloat16)
    attention = Linear(64, 64)
    attention.gate_proj, attention.up_proj = layers
    weights = [layer.weight for layer in layers]
    use_few_rows_kernels(attention, multiply)
    xs = [mx.random.normal((1, 2, 64)).astype(mx.bfloat16) for _ in range(2)]
    for x, layer, weight in zip(xs, layers, weights, strict=True):
        assert mx.array_equal(layer(x), x @ weight.T)
    assert mx.array_equal(layers[1](xs[0]), xs[0] @ weights[1].T)


# ---- towers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm4v_moe"]
)
def test_a_tower_is_compiled_for_each_size(load_tiny: Load, family: str):
    tower = copy.copy(load_tiny(family)[0].model.vision_tower)
    assert isinstance(tower, FrameTower)
    tower.device = Device(DeviceKind.CUDA, "a GPU", 1, 1)
    tower._graphs = {}
    side = tower.patch_embed.patch_size
    for grid in (Grid(1, 16, 24), Grid(1, 10, 12), Grid(1, 16, 24)):
        patches = mx.random.normal((grid.patches, 3 * 2 * side**2))
        made = tower.encode(patches, np.array([[grid.frames, grid.height, grid.width]]))
        expected = tower._encode_one(patches, grid)
        for one, other in zip(
            (made.rows, *made.deepstack), (expected.rows, *expected.deepstack), strict=True
        ):
            assert mx.allclose(one, other, atol=1e-5)
    assert list(tower._graphs) == [Grid(1, 10, 12), Grid(1, 16, 24)]
