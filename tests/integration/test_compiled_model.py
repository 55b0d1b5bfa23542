"""A compiled model gives the same answers as the uncompiled model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx import nn
from mlx.nn import Linear, QuantizedLinear  # type: ignore[attr-defined]
from mlx_vlm.models.cache import make_prompt_cache

from tests.integration.harness import (
    EngineHarness,
    Load,
    Served,
    ask,
    cached_tokens,
    caches_of,
    conversation,
    load_model,
)
from tests.integration.oracle import Oracle
from tests.integration.prompts import LONGER, PROMPTS, prompt_request
from tests.integration.segments import attend_everywhere, attend_to_segments
from tests.support.experts import multiply_by_expert
from tests.support.images import random_image
from tests.support.whole_run import few_of
from tests.tiny_models.fixtures import TinyModel
from vlm_server.engine.scheduler.sizing import chunk_sizer
from vlm_server.protocol import Failed, SamplingParams
from vlm_server.runner.backends import rows as kv_rows
from vlm_server.runner.backends.bounded_layer import first_columns
from vlm_server.runner.backends.cpu import CpuAttention
from vlm_server.runner.backends.cuda import few_rows, kernels
from vlm_server.runner.backends.cuda.attention import CudaBackend
from vlm_server.runner.backends.cuda.few_rows import use_few_rows_kernels
from vlm_server.runner.backends.cuda.linear_kernels import Packing
from vlm_server.runner.backends.gated_delta import gated_delta_in_chunks
from vlm_server.runner.backends.rows import KeysAndValues, Run
from vlm_server.runner.decode import decode_batch, sequence
from vlm_server.runner.decode.sequence import Sampled
from vlm_server.runner.device.device import Device, DeviceKind
from vlm_server.runner.kv.batch_cache import join
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model import compiled_model
from vlm_server.runner.model.attention import ModelAttention
from vlm_server.runner.model.chunks import PromptChunk, StepOutput
from vlm_server.runner.model.compiled_model import CompiledModel
from vlm_server.runner.model.forward_pass import text_inputs
from vlm_server.runner.model.mrope import next_position_ids
from vlm_server.runner.model.step_shapes import StepShape, all_shapes
from vlm_server.runner.prefill.prefill import Prefill
from vlm_server.runner.vision.grids import Grid
from vlm_server.runner.vision.towers import FrameTower

pytestmark = pytest.mark.families("rope")

Model = TypeVar("Model", bound=CompiledModel)

CANT_BE_COMPILED = (
    "glm4v", "glm4v_moe", "glm5_next", "kimi_k25", "llama4", "nemotron_h_nano_omni",
    "paddleocr_vl", "paligemma", "qwen3_omni_moe",
)  # fmt: skip
"""They look at values of arrays while they build a step, attend in ways of their own, or have
states that count padding."""


class Compiled(CompiledModel):
    """Records its compiled steps and the chunks that it ran."""

    num_steps = 0
    chunks: list[int]
    piggybacked: list[int]
    """Tokens of the chunks that mixed steps have read."""

    def _compiled_step(self, *arguments: Any) -> tuple[StepOutput, StepOutput | None] | None:
        made, chunk = super()._compiled_step(*arguments), arguments[-1]
        self.num_steps += made is not None
        if made is not None and made[1] is not None:
            self.piggybacked.append(chunk.num_tokens)
        return made

    def prefill(self, chunk: PromptChunk) -> StepOutput | None:
        output = super().prefill(chunk)
        if output is not None:
            self.chunks.append(chunk.num_tokens)
        return output


def new_model(kind: type[Model], loaded: LoadedModel, mixed_step_tokens: int) -> Model:
    embed = text_inputs(loaded.model)
    loaded.forget_positions()
    positions, widths = loaded.decode_positions, (4,)
    arguments = loaded.family.deepstack.arguments
    return kind(
        loaded.language_model,
        loaded.attention,
        positions,
        widths,
        arguments,
        embed,
        mixed_step_tokens,
        has_adapters=bool(loaded.spec.adapters),
        keeps_hidden=loaded.draft_head is not None,
    )


def compiled(
    served: Served, mixed_step_tokens: int = 0, **limits: Any
) -> tuple[EngineHarness, Compiled]:
    """An engine whose model is compiled, and the model."""
    loaded, preparer = served
    model = new_model(Compiled, loaded, mixed_step_tokens)
    model.chunks, model.piggybacked = [], []
    return EngineHarness(replace(loaded, text=model), preparer, **limits), model


def run_all(engine: EngineHarness, params: SamplingParams, stagger: int) -> Mapping[str, list[int]]:
    for name in PROMPTS:
        engine.add(prompt_request(name, params))
        engine.step(stagger)
    engine.run()
    return engine.tokens


@pytest.mark.parametrize("stagger", [pytest.param(0, marks=pytest.mark.whole), 4])
def test_compiled_answers_equal_uncompiled_answers(
    served: Served, answered: EngineHarness, stagger: int
):
    engine, model = compiled(served)
    assert run_all(engine, LONGER, stagger) == answered.tokens
    is_compiled = served[0].family.name not in CANT_BE_COMPILED
    assert bool(model.num_steps) == model.can_compile == is_compiled


READ_BESIDE = {
    "text": ("gemma4", "gemma4_unified"),
    "media": (
        "qwen2_vl", "qwen2_5_vl", "smolvlm", "idefics3", "pixtral", "mistral3", "internvl",
        "internvl_chat", "llava", "llava_onevision", "fastvlm", "kimi_vl", "dots_ocr", "glm_ocr",
        "aya_vision", "gemma3", "gemma3n", "granite4_vision", "idefics2", "lfm2_vl", "llava_next",
        "jina_vlm", "minicpmo", "molmo2", "step3p7",
        "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
    ),
}  # fmt: skip
"""What of which families' prompts is read in the pass of a decode step."""


def learn_step_times(engine: EngineHarness) -> None:
    """Run the steps that a compiled model learns from before mixed steps."""
    for words in ("Hello.", "Good morning."):
        engine.answer(ask(words, words))


def decoding_engine(served: Served, **limits: Any) -> tuple[EngineHarness, Compiled]:
    """An engine that answers "long", and reads other prompts beside that."""
    engine, model = compiled(served, 24, **limits)
    learn_step_times(engine)
    engine.add(prompt_request("long", LONGER))
    engine.step(4)
    return engine, model


@pytest.mark.parametrize("mixed_step_tokens", [24, pytest.param(256, marks=pytest.mark.whole)])
def test_prompts_are_piggybacked_on_decode_steps(
    served: Served, answered: EngineHarness, mixed_step_tokens: int
):
    engine, model = compiled(served, mixed_step_tokens)
    learn_step_times(engine)
    found = run_all(engine, LONGER, 4)
    assert {name: found[name] for name in PROMPTS} == answered.tokens
    name = served[0].family.name
    assert bool(model.piggybacked) == any(name in names for names in READ_BESIDE.values())
    if name in READ_BESIDE["media"]:
        num_tokens = sum(engine.prompts[prompt].num_tokens for prompt in PROMPTS)
        assert sum(model.piggybacked) == num_tokens - engine.prompts["text"].num_tokens


@pytest.fixture(params=["qwen2_5_vl", "smolvlm", "llava"])
def some_family(request: pytest.FixtureRequest, load_tiny: Load) -> Served:
    """Families with M-RoPE, with tiles, and with heads that share no keys."""
    return load_tiny(request.param)


@pytest.mark.parametrize("mixed_step_tokens", [0, 24])
@pytest.mark.parametrize(
    "rate", [pytest.param(0.0, marks=pytest.mark.whole, id="right"), pytest.param(0.5, id="mixed")]
)
def test_compiled_steps_verify_drafts_without_changing_answers(
    some_family: Served, monkeypatch: pytest.MonkeyPatch, rate: float, mixed_step_tokens: int
):
    plain = EngineHarness(*some_family)
    run_all(plain, LONGER, 0)
    answers = {
        tuple(plain.prompts[name].token_ids.tolist()): [tokens]
        for name, tokens in plain.tokens.items()
    }
    engine, model = compiled(some_family, mixed_step_tokens, num_draft_tokens=7)
    learn_step_times(engine)
    monkeypatch.setattr(sequence, "Drafter", Oracle(answers, rate))
    found = run_all(engine, LONGER, 2)
    assert {name: found[name][: LONGER.max_tokens] for name in PROMPTS} == plain.tokens
    assert engine.scheduler.stats().spec_drafts > 0
    assert model.num_steps
    assert bool(model.piggybacked) == bool(mixed_step_tokens)


@pytest.mark.whole
def test_answers_stay_equal_while_compiled_buffers_grow(some_family: Served):
    params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    engines = compiled(some_family)[0], EngineHarness(*some_family)
    for engine in engines:
        engine.add(prompt_request("text", params))
        engine.step(200)
        engine.add(prompt_request("long", params))
        engine.run()
    assert engines[0].tokens == engines[1].tokens
    assert len(engines[0].tokens["text"]) == 300


@pytest.mark.parametrize("mixed_step_tokens", [0, 24])
def test_choices_and_aborts_answer_as_uncompiled(some_family: Served, mixed_step_tokens: int):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=3)
    engines = compiled(some_family, mixed_step_tokens)[0], EngineHarness(*some_family)
    learn_step_times(engines[0])
    for engine in engines:
        engine.add(prompt_request("text", params))
        engine.add(prompt_request("long", LONGER))
        engine.step(8)
        engine.abort("long")
        engine.add(prompt_request("image", LONGER))
        engine.run()
    first, second = (
        {seq: each.seqs[seq] for seq in each.seqs if seq.request_id in ("text", "image")}
        for each in engines
    )
    assert first == second
    assert len(first) == 4


def test_uncached_prompt_tail_is_prefilled_by_compiled_chunks(some_family: Served):
    image = random_image(1)
    first = ask("first", image, "What is this?")
    again = ask("again", image, "What is this?")
    other = ask("other", image, "And which colour has it?")
    turns = ("user", (image, "What is this?")), ("assistant", ("It.",)), ("user", ("Sure?",))
    engine, model = compiled(some_family, caches=caches_of(some_family))
    plain = EngineHarness(*some_family, caches=caches_of(some_family))
    for submit in (first, again, other, conversation("next", *turns)):
        assert engine.answer(submit) == plain.answer(submit)
    assert len(model.chunks) >= 3  # the first finds no buffers to learn from
    assert 1 in model.chunks
    assert max(model.chunks) > 1


def of_prompt(loaded: LoadedModel, token_ids: list[int], start: int) -> dict[str, mx.array]:
    """Inputs of a language model with M-RoPE for a text's tokens from `start` on."""
    positions = mx.arange(start, start + len(token_ids))
    return {
        "inputs_embeds": loaded.language_model.model.embed_tokens(mx.array(token_ids)[None]),
        "position_ids": mx.broadcast_to(positions, (3, 1, len(token_ids))),
    }


def chunk_of(loaded: LoadedModel, cache: list[Any], token_ids: list[int]) -> PromptChunk:
    inputs = of_prompt(loaded, token_ids, cache[0].offset)
    return PromptChunk(mx.array([token_ids]), inputs, cache, 256)


@pytest.fixture(params=[mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def typed_model(request: pytest.FixtureRequest, tiny_model: TinyModel) -> LoadedModel:
    """A model in float32 and in half precision, as far as the device's kernels take it."""
    if request.param == mx.float32 and mx.cuda.is_available():
        pytest.skip("our kernels take half precision")
    loaded = load_model(tiny_model("qwen2_5_vl"))
    loaded.language_model.set_dtype(request.param)
    return loaded


def check_alike(found: mx.array, wanted: mx.array) -> None:
    """Whether logits are equal, up to rounding."""
    assert found.shape == wanted.shape
    tolerance = 1e-4 if wanted.dtype == mx.float32 else 0.03
    distance = mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32)).max()
    assert distance <= tolerance * mx.abs(wanted.astype(mx.float32)).max()


@pytest.mark.parametrize("count", few_of([129, 700, 1280], [129]))
def test_long_compiled_chunk_equals_eager_model(
    typed_model: LoadedModel, tiny_model: TinyModel, count: int
):
    """In half precision, both are equally far from the float32 logits."""
    loaded, language_model = typed_model, typed_model.language_model
    model = new_model(CompiledModel, loaded, 0)
    row = make_prompt_cache(language_model)
    mx.eval(language_model(mx.array([[1, 2]]), cache=row, **of_prompt(loaded, [1, 2], 0)).logits)
    positions = next_position_ids(loaded.decode_positions, [2], 1)
    made = model._compiled_step(mx.array([[3]]), row, positions, None)
    assert made is not None  # it knows the layers now

    start, token_ids = list(range(4, 24)), [number % 50 + 3 for number in range(count)]

    def cache_of(loaded: LoadedModel) -> list[Any]:
        """A cache with the tokens of `start`."""
        cache = make_prompt_cache(loaded.language_model)
        inputs = of_prompt(loaded, start, 0)
        mx.eval(loaded.language_model(mx.array([start]), cache=cache, **inputs).logits)
        return cache

    def by_model(loaded: LoadedModel) -> mx.array:
        inputs, cache = of_prompt(loaded, token_ids, len(start)), cache_of(loaded)
        logits: mx.array = loaded.language_model(
            mx.array([token_ids]), cache=cache, **inputs
        ).logits[:, -1]
        return logits.astype(mx.float32)

    chunk = chunk_of(loaded, cache_of(loaded), token_ids)
    assert model._supports_chunk(chunk)
    found, wanted = model.prefill(chunk), by_model(loaded)
    assert found is not None
    logits = found.logits[:, -1]
    assert logits.shape == wanted.shape
    exact = by_model(load_model(tiny_model("qwen2_5_vl")))
    rounding = mx.abs(wanted - exact).max() + 1e-4 * mx.abs(exact).max()
    assert mx.abs(logits.astype(mx.float32) - exact).max() <= 2 * rounding


@pytest.mark.skipif(mx.cuda.is_available(), reason="our kernels take half precision")
@pytest.mark.parametrize("is_precompiled", [True, False])
def test_long_chunks_after_many_tokens_take_graphs_until_attention_is_planned(
    some_family: Served, monkeypatch: pytest.MonkeyPatch, *, is_precompiled: bool
):
    monkeypatch.setattr(compiled_model, "_MAX_KEYS", 600)
    monkeypatch.setattr(
        chunk_sizer, "_MAX_IDLE_CHUNK_SECONDS", 60.0
    )  # chunks are as long on a busy machine
    monkeypatch.setattr(CpuAttention, "is_precompiled", lambda *_: is_precompiled)
    prompts = [" ".join([word] * 130) for word in ("red", "blue")]
    turns = ("user", prompts[:1]), ("assistant", ("Yes.",)), ("user", prompts[1:])
    engine, model = compiled(some_family, caches=caches_of(some_family))
    plain = EngineHarness(*some_family, caches=caches_of(some_family))
    learn_step_times(engine)
    del model.chunks[:]
    for number in (1, 3):
        submit = conversation(f"turn {number}", *turns[:number])
        assert engine.answer(submit) == plain.answer(submit)
    first, second = (engine.prompts[name].num_tokens for name in ("turn 1", "turn 3"))
    assert first <= 600 < second
    long = [count for count in model.chunks if count > 128]
    assert len(long) == (1 if is_precompiled else 2)


def test_mixed_step_equals_separate_decode_and_prefill(typed_model: LoadedModel):
    loaded, language_model = typed_model, typed_model.language_model
    model = new_model(CompiledModel, loaded, 64)

    def logits(*, is_one_pass: bool) -> list[mx.array]:
        rows: list[Any] = []
        for number, length in enumerate((30, 7)):
            cache = make_prompt_cache(language_model)
            token_ids = list(range(1, length + 1))
            inputs = of_prompt(loaded, token_ids, 0)
            mx.eval(language_model(mx.array([token_ids]), cache=cache, **inputs).logits)
            rows = join(rows, number, cache, 1)
        prompt, made = make_prompt_cache(language_model), list[mx.array]()
        for number, count in enumerate((20, 31, 62)):
            chunk = chunk_of(loaded, prompt, [number + 3] * count)
            positions = next_position_ids(loaded.decode_positions, [30 + number, 7 + number], 1)
            given = chunk if number and is_one_pass else None
            made_of_both = model._compiled_step(mx.array([[5], [6]]), rows, positions, given)
            assert made_of_both is not None
            stepped, read = made_of_both
            assert (read is not None) == (given is not None)
            read = read if given else model.prefill(chunk)
            assert read is not None
            made += [stepped.logits[:, -1], read.logits[:, -1]]
        return made

    for one, two in zip(logits(is_one_pass=True), logits(is_one_pass=False), strict=True):
        check_alike(one, two)


def test_eager_chunk_after_mixed_step_writes_in_place(
    load_tiny: Load, monkeypatch: pytest.MonkeyPatch
):
    served = load_tiny("qwen2_5_vl")
    engine, model = decoding_engine(served)
    engine.add(prompt_request("images", LONGER))
    engine.step_until(lambda: bool(model.piggybacked))
    (prefill,) = engine.runner._prefills.values()
    layer = prefill.kv.cache[0]
    first_columns(layer)  # as on CUDA
    monkeypatch.setattr(CompiledModel, "prefill", lambda *_: None)
    engine.abort("long")
    engine.step_until(lambda: "columns" not in vars(layer))
    engine.run()
    assert engine.tokens["images"] == EngineHarness(*served).answer(
        prompt_request("images", LONGER)
    )


def test_aborted_piggybacked_prompt_leaves_decoding_answers_unchanged(some_family: Served):
    engine, model = decoding_engine(some_family)
    engine.add(prompt_request("images", LONGER))
    engine.step_until(lambda: bool(model.piggybacked))
    engine.abort("images")
    engine.add(prompt_request("text", LONGER))
    engine.run()
    plain = EngineHarness(*some_family)
    assert engine.tokens["long"] == plain.answer(prompt_request("long", LONGER))
    assert engine.tokens["text"] == plain.answer(prompt_request("text", LONGER))
    assert engine.num_tracked == 0


def test_cancelled_piggybacked_prompt_is_stored(some_family: Served):
    engine, model = decoding_engine(some_family, caches=caches_of(some_family))
    engine.add(prompt_request("images", LONGER))
    engine.step_until(lambda: bool(model.piggybacked))
    progress = {each.request_id: each.done for each in engine.scheduler.stats().progress}
    engine.abort("images")
    engine.run()
    again = msgspec.structs.replace(prompt_request("images", LONGER), request_id="again")
    assert engine.answer(again) == EngineHarness(*some_family).answer(again)
    key = engine.prompts["again"].key
    assert cached_tokens(engine, "again") == key.floor(progress["images"])


def test_failed_mixed_step_fails_its_prompt_and_stores_nothing(
    some_family: Served, monkeypatch: pytest.MonkeyPatch
):
    """The state of the prompt's chunk is unknown, so the request fails and stores nothing."""
    engine, model = decoding_engine(some_family, caches=caches_of(some_family))
    known = engine.caches.prefixes.stats().entries
    read = decode_batch.DecodeBatch.result

    def fail(batch: decode_batch.DecodeBatch) -> Sampled:
        if not model.piggybacked:
            return read(batch)
        monkeypatch.undo()
        raise RuntimeError("the device stopped")

    monkeypatch.setattr(decode_batch.DecodeBatch, "result", fail)
    engine.add(prompt_request("images", LONGER))
    engine.run()
    assert isinstance(engine.ends["long"], Failed)
    assert isinstance(engine.ends["images"], Failed)
    assert engine.caches.prefixes.stats().entries == known


def test_cached_prefix_is_continued_in_mixed_steps(some_family: Served):
    image = random_image(1)
    turns = ("user", (image, "What is this?")), ("assistant", ("It.",)), ("user", ("Sure?",))
    engine, model = compiled(some_family, 24, caches=caches_of(some_family))
    plain = EngineHarness(*some_family)
    learn_step_times(engine)
    engine.answer(conversation("first", *turns[:1]))
    engine.add(prompt_request("long", LONGER))
    engine.step(4)
    engine.add(conversation("next", *turns))
    engine.run()
    assert model.piggybacked
    assert sum(model.piggybacked) < engine.prompts["next"].num_tokens  # the rest was cached
    assert engine.tokens["next"] == plain.answer(conversation("next", *turns))
    assert engine.tokens["long"] == plain.answer(prompt_request("long", LONGER))


@pytest.mark.parametrize(
    ("error", "goes_on"), [("[malloc] Unable to allocate", True), ("no such kernel", False)]
)
def test_failed_mixed_step_is_repeated_as_two_steps(
    load_tiny: Load, monkeypatch: pytest.MonkeyPatch, error: str, goes_on: bool
):
    served = load_tiny("qwen2_5_vl")
    engine, model = compiled(served, 24)
    learn_step_times(engine)
    launch, num_failed = mx.async_eval, 0

    def fail(*arrays: Any) -> None:
        """When the first pass that reads a prompt is launched: its buffers are made by then."""
        nonlocal num_failed
        if num_failed == 0 and sys._getframe(1).f_code is CompiledModel._mixed_step.__code__:
            num_failed = 1
            raise RuntimeError(error)
        launch(*arrays)

    monkeypatch.setattr(mx, "async_eval", fail)
    plain = EngineHarness(*served)
    assert run_all(engine, LONGER, 4).items() >= run_all(plain, LONGER, 0).items()
    assert num_failed
    assert bool(model.piggybacked) == goes_on


def test_failed_piggybacked_chunk_fails_only_its_prompt(
    load_tiny: Load, monkeypatch: pytest.MonkeyPatch
):
    served = load_tiny("qwen2_5_vl")
    engine, model = decoding_engine(served)

    def fail(*_: Any) -> None:
        raise RuntimeError("no such image")

    monkeypatch.setattr(Prefill, "chunk", fail)
    engine.add(prompt_request("text", LONGER))
    engine.run()
    assert isinstance(engine.ends["text"], Failed)
    assert engine.tokens["long"] == EngineHarness(*served).answer(prompt_request("long", LONGER))
    assert not model.piggybacked


def test_model_changing_embeddings_is_not_piggybacked(load_tiny: Load):
    assert text_inputs(load_tiny("gemma4")[0].model) is not None
    assert text_inputs(load_tiny("qwen2_5_vl")[0].model) is not None


def test_shapes_of_one_request_are_precompiled_first():
    numbers = [max(shape.rows, 1) for shape in all_shapes((16,), 640, has_adapters=True)]
    likely = [number for number in numbers if number <= 8]
    assert numbers[: numbers.count(1)] == [1] * numbers.count(1)
    assert numbers[: len(likely)] == likely
    assert max(numbers) == 32


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "gemma4", "gemma4_unified"])
def test_kernels_compiled_while_idle_change_no_answer(load_tiny: Load, family: str):
    served = load_tiny(family)
    engine, model = compiled(served, 64)
    expected = EngineHarness(*served).answer(prompt_request("image"))
    assert engine.answer(prompt_request("image")) == expected
    engine.answer(prompt_request("text"))
    model._shapes_to_compile = dict.fromkeys(
        [
            StepShape(2),
            *([] if family == "qwen3_5" else [StepShape(2, 4)]),  # its drafts are not compiled
            StepShape(0, prompt_tokens=128),
            StepShape(2, prompt_tokens=62),
        ]
    )
    while model.precompile_next():
        pass
    assert model.can_compile
    assert engine.answer(ask("again", *PROMPTS["image"])) == expected


def test_uncompilable_model_runs_uncompiled(load_tiny: Load):
    served = load_tiny("paddleocr_vl")
    engine, model = compiled(served)
    assert engine.answer(prompt_request("text")) == EngineHarness(*served).answer(
        prompt_request("text")
    )
    assert not model.can_compile
    assert not model.precompile_next()


class Broken:
    """An attention whose kernel fails to compile at its first run."""

    appends_in_place = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def supports(self, *arguments: Any) -> bool:
        return bool(self.inner.supports(*arguments))

    def __call__(self, *arguments: Any) -> mx.array:
        made: mx.array = self.inner(*arguments)
        return made

    def attend_bounded(self, queries: mx.array, *_: Any) -> mx.array:
        return mx.linalg.inv(mx.zeros((*queries.shape[:-1], 1, 1)), stream=mx.cpu).reshape(
            *queries.shape[:-1], 1
        ) * mx.ones(queries.shape)

    def precompile_next(self) -> bool:
        return False


def test_failing_kernels_turn_compilation_off(load_tiny: Load):
    loaded, preparer = load_tiny("qwen2_5_vl")
    attention = ModelAttention(loaded.language_model, Broken(loaded.attention.attention))
    arguments = loaded.family.deepstack.arguments
    model = CompiledModel(
        loaded.language_model, attention, loaded.decode_positions, (4,), arguments
    )
    engine = EngineHarness(replace(loaded, text=model), preparer)
    assert engine.answer(prompt_request("text")) == EngineHarness(loaded, preparer).answer(
        prompt_request("text")
    )
    assert not model.can_compile


def test_compiled_step_out_of_memory_once_is_retried(
    load_tiny: Load, monkeypatch: pytest.MonkeyPatch
):
    served = load_tiny("qwen2_5_vl")
    engine, model = compiled(served)
    evaluate, failed = mx.eval, list[bool]()

    def fail_once(*arrays: Any) -> None:
        if not failed and sys._getframe(1).f_code is CompiledModel._compiled_step.__code__:
            failed.append(True)
            raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", fail_once)
    assert engine.answer(prompt_request("text")) == EngineHarness(*served).answer(
        prompt_request("text")
    )
    assert failed
    assert model.can_compile
    assert model.num_steps


def arrange_by_mlx(sources: list[KeysAndValues], places: mx.array, capacity: int) -> KeysAndValues:
    """The reference for `arrange_rows`."""
    runs = [Run(row, 1, start, n, to, source) for source, row, start, n, to, _ in places.tolist()]
    keys, values = zip(*sources, strict=True)
    return kv_rows._arrange(keys, runs, capacity), kv_rows._arrange(values, runs, capacity)


def arrange_swapped(sources: list[KeysAndValues], places: mx.array, capacity: int) -> KeysAndValues:
    return arrange_by_mlx(sources[::-1], places, capacity)


def rotated(
    queries: mx.array, keys: mx.array, cosines: mx.array, sines: mx.array
) -> tuple[mx.array, mx.array]:
    """The reference for `rotate_heads`."""
    half = cosines.shape[-1]
    made = []
    for x in (queries, keys):
        first, second, rest = mx.split(x, [half, 2 * half], axis=-1)
        pairs = first * cosines - second * sines, second * cosines + first * sines
        made.append(mx.concatenate([*pairs, rest], axis=-1))
    return made[0], made[1]


def rotated_back(
    queries: mx.array, keys: mx.array, cosines: mx.array, sines: mx.array
) -> tuple[mx.array, mx.array]:
    return rotated(queries, keys, cosines, -sines)


def multiply_without_last(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    widths: Sequence[int],
    packing: Packing | None = None,
) -> list[mx.array]:
    *parts, last = multiply(x, weight, bias, widths, packing)
    return [*parts, mx.zeros_like(last)]


def multiply_by_first(*arguments: Any) -> mx.array:
    x, weight, bias, experts, packing = arguments
    return multiply_by_expert(x, weight, bias, experts[:1] + 0 * experts, packing)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        (None, None),
        ("attend_to_segments", attend_everywhere),
        ("arrange_rows", arrange_swapped),
        ("rotate_heads", rotated_back),
        ("skinny_linear", multiply_without_last),
        ("expert_rows", multiply_by_first),
    ],
)
def test_kernels_differing_from_mlx_are_not_used(
    monkeypatch: pytest.MonkeyPatch, name: str | None, replacement: Callable[..., Any]
):
    gpu = Device(DeviceKind.CUDA, "a GPU", 1, 1, runs_our_kernels=True)
    monkeypatch.setattr(kernels, "current_device", lambda: gpu)
    monkeypatch.setattr(kernels, "skinny_linear", multiply)
    monkeypatch.setattr(kernels, "expert_rows", multiply_by_expert)
    monkeypatch.setattr(kernels, "arrange_rows", arrange_by_mlx)
    monkeypatch.setattr(kernels, "rotate_heads", rotated)
    monkeypatch.setattr(kernels, "gated_delta", gated_delta_in_chunks)
    monkeypatch.setattr(kernels, "attend_to_segments", attend_to_segments)
    if name is not None:
        monkeypatch.setattr(kernels, name, replacement)
    assert kernels.can_be_used.__wrapped__() is (name is None)


@pytest.mark.skipif(mx.cuda.is_available(), reason="asks where there is no CUDA GPU")
def test_kernels_are_not_used_without_cuda_gpu():
    assert not kernels.can_be_used()


# ---- layers with one input -----------------------------------------------------------


def multiply(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    widths: Sequence[int],
    packing: Packing | None = None,
) -> list[mx.array]:
    if packing is not None:
        weight = mx.dequantize(
            weight,
            packing.scales,
            packing.offsets,
            group_size=packing.group_size,
            bits=packing.bits,
        )
    product = x @ weight.T
    product = product if bias is None else product + bias
    return mx.split(product, list(accumulate(widths[:-1])), axis=-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        *((name, None) for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm")),
        *((name, 4) for name in ("qwen2_5_vl", "qwen3_vl", "smolvlm")),
    ],
)
def test_few_row_kernels_leave_logits_and_weight_bytes_unchanged(
    tiny_model: TinyModel, family: str, bits: int | None
):
    loaded = load_model(tiny_model(family))
    language_model = loaded.language_model
    if bits is not None:
        nn.quantize(language_model, group_size=32, bits=bits)  # type: ignore[attr-defined]
    language_model.set_dtype(mx.bfloat16)
    few, many = mx.array([[1, 2, 3]]), mx.array([[1, 2, 3] * 20])
    rows = mx.array([[1], [2]] * 20)  # as in a pass

    def logits() -> list[mx.array]:
        made = []
        for tokens in (few, many, rows):
            made.append(language_model(tokens).logits)
            loaded.forget_positions()
        return made

    expected = logits()
    before = sum(layer.weight.nbytes for layer in language_model.modules() if "weight" in layer)
    use_few_rows_kernels(language_model, multiply)
    modules = language_model.modules()
    assert not any(type(layer) in (Linear, QuantizedLinear) for layer in modules)
    assert sum(len(m.product._layers) > 1 for m in modules if hasattr(m, "product")) >= 5
    assert sum(layer.weight.nbytes for layer in modules if "weight" in layer) == before
    for found, wanted in zip(logits(), expected, strict=True):
        assert mx.abs(found - wanted).max() <= 0.1 * mx.abs(wanted).max()


@pytest.mark.parametrize(("shape", "is_shared"), [((40, 1, 64), True), ((1, 40, 64), False)])
def test_qkv_projections_of_few_rows_are_one_product(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], is_shared: bool
):
    attention, calls = Linear(64, 64), []
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        layer = Linear(64, 16 * (number + 1))
        layer.set_dtype(mx.bfloat16)
        setattr(attention, name, layer)
    x = mx.random.normal(shape).astype(mx.bfloat16)
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    expected = [layer(x) for layer in layers]
    use_few_rows_kernels(attention, multiply)

    def noted(*arguments: Any) -> list[mx.array]:
        calls.append(arguments)
        return multiply(*arguments)

    monkeypatch.setattr(few_rows, "_by_mlx", noted)
    for layer, wanted in zip(layers, expected, strict=True):
        assert mx.allclose(layer(x), wanted, atol=0.05)
    assert len(calls) == is_shared


def test_combined_product_is_bypassed_for_different_input():
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
def test_tower_is_compiled_once_per_size(load_tiny: Load, family: str):
    tower = copy.copy(load_tiny(family)[0].model.vision_tower)
    assert isinstance(tower, FrameTower)
    tower._backend = CudaBackend()
    tower._function_of = lru_cache(16)(tower._new_function)
    side = tower.patch_embed.patch_size
    for grid in (Grid(1, 16, 24), Grid(1, 10, 12), Grid(1, 16, 24)):
        patches = mx.random.normal((grid.patches, 3 * 2 * side**2))
        made = tower.encode(patches, np.array([[grid.frames, grid.height, grid.width]]))
        rows, deepstack, _ = tower._encode_one(patches, grid)
        expected = [rows, *deepstack]
        for one, other in zip((made.rows, *made.deepstack), expected, strict=True):
            assert mx.allclose(one, other, atol=1e-5)
    assert tower._function_of.cache_info().currsize == 2
