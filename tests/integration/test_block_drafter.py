"""Heads that guess blocks of tokens, of random weights; see also `test_trained_drafter.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.utils import get_model_and_args
from msgspec import structs

from tests.integration.harness import ask, load_model, new_preparer
from tests.integration.seen_prompt import SeenPrompt
from tests.integration.test_prefill_together import new_engine_of
from tests.integration.test_trained_drafter import engine_of, mute, often, run_all
from tests.support.whole_run import few_of
from tests.tiny_models import cached
from tests.tiny_models.draft_heads import CONFIG, WEIGHTS, dflash_config
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.errors import ModelLoadError
from vlm_server.hub.examination import ExaminationRequest
from vlm_server.protocol import Failed, SamplingParams
from vlm_server.runner.drafters.block_head import BlockHead
from vlm_server.runner.kv import batch_cache
from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.facts import examine
from vlm_server.runner.model.lm_head import WantedLogits, logits_of
from vlm_server.settings import MemorySettings, ModelSettings

__all__ = ["mute", "often"]

WINDOW = 16
COUNT = 4
"""Guesses at a time."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
IN_BLOCK = "dflash_config"
FEW_TOKENS = "dflash of few tokens"
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash in a window": SLIDING,
    FEW_TOKENS: {IN_BLOCK: {"draft_window_size": WINDOW}},
    "causal dflash": SLIDING | {IN_BLOCK: {"causal": True}},
    "dflash with sinks": {IN_BLOCK: {"attention_sink_bias": True}},
    "dspark": {IN_BLOCK: {"projector_type": "dspark"}, "markov_rank": 8, "proposal_length": 7},
    "dspark of gemma": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4DSparkModel"],
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": 6,
        "num_global_key_value_heads": 2,
        "global_head_dim": 32,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        "markov_rank": 8,
    },
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        IN_BLOCK: {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 4,
        },
    },
}
FEW = ["dflash in a window", "dspark"]


def write_random(variant: str, model: Path, folder: Path) -> Path:
    """A head of random weights, in mlx-vlm's layout, for the checkpoint in `model`."""
    changes, config = VARIANTS[variant], dflash_config(model)
    config |= changes | {IN_BLOCK: config[IN_BLOCK] | changes.get(IN_BLOCK, {})}
    package, _ = get_model_and_args(config)
    mx.random.seed(3)
    module = package.Model(package.ModelConfig.from_dict(config))
    weights = {
        name: array if "norm" in name else 0.3 * mx.random.normal(array.shape)
        for name, array in tree_flatten(module.parameters())
    }
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})
    return folder


def head_of(loaded: LoadedModel) -> BlockHead:
    assert isinstance(loaded.draft_head, BlockHead)
    return loaded.draft_head


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def model_of(variant: str) -> str:
    return "gemma4" if "gemma" in variant else "qwen3_5"


@pytest.mark.parametrize(
    ("family", "variant"),
    few_of(
        [(model_of(variant), variant) for variant in VARIANTS] + [("lfm2_vl", "dspark")],
        [("qwen3_5", variant) for variant in FEW],
    ),
)
def test_guesses_equal_those_of_mlx_vlms_drafter(tmp_path: Path, variant: str, family: str):
    """Of a head of few tokens, mlx-vlm lets the first block after a prompt see all of them."""
    model = cached(family)
    folder = write_random(variant, model, tmp_path / "head")
    loaded, drafter = load_model(model, drafter=str(folder)), load_drafter(str(folder))[0]
    drafter._project_context_kv = lambda _: None  # else mlx-vlm's own for Gemma 4 fails
    language_model, found = loaded.language_model, set[int]()
    counts = (1, 2, WINDOW - 2, WINDOW - 1, WINDOW, *(() if variant == FEW_TOKENS else (40,)))
    for seed, count in enumerate(counts):
        prompt = SeenPrompt(loaded, count, seed)
        layers = drafter.reset(loaded.model)
        cache, ids = make_prompt_cache(language_model), drafter.config.target_layer_ids
        states = language_model(prompt.token_ids, cache=cache, capture_layer_ids=ids).hidden_states
        loaded.forget_positions()
        hidden = mx.concatenate(states, axis=-1)
        with logits_of(language_model, WantedLogits(COUNT)):
            block = drafter.draft_block(prompt.newest, hidden, layers, COUNT + 1, greedy)
        wanted = block[0].tolist()
        head_layers = loaded.head_layers(prompt.layers)
        [own] = head_of(loaded).draft_block([prompt.newest], prompt.hidden, head_layers, COUNT)
        assert own.tolist() == wanted, count
        found |= set(wanted)
    assert len(found) > 5


@pytest.mark.parametrize("variant", few_of(VARIANTS, FEW))
@pytest.mark.parametrize("storage", [EXACT, KVStorage(8, of_running=True)], ids=["exact", "8 bits"])
@pytest.mark.parametrize("counts", [(40,), (5, 60, 17), (33, 2, 3, 3)])
def test_guesses_in_batch_equal_those_alone(
    tmp_path: Path, variant: str, counts: Sequence[int], storage: KVStorage
):
    """Of rows of all lengths, and after some of them lost tokens."""
    model = cached(model_of(variant))
    folder = write_random(variant, model, tmp_path / "head")
    loaded = replace(load_model(model, drafter=str(folder)), kv_storage=storage)
    head, prompts = head_of(loaded), [SeenPrompt(loaded, n, seed) for seed, n in enumerate(counts)]
    alone = [
        head.draft_block([each.newest], each.hidden, loaded.head_layers(each.layers), COUNT)
        for each in prompts
    ]
    mx.eval(alone)
    rows: list[Any] = []
    for number, prompt in enumerate(prompts):
        rows = batch_cache.join(rows, number, loaded.head_layers(prompt.layers), 1)
    newest = [prompt.newest for prompt in prompts]
    hidden = mx.concatenate([prompt.hidden for prompt in prompts])
    assert head.draft_block(newest, hidden, rows, COUNT).tolist() == mx.concatenate(alone).tolist()
    if len(prompts) == 1:
        return
    more = mx.random.normal((len(prompts), 4, hidden.shape[-1]))
    head.append_text(mx.zeros((len(prompts), 4), mx.int32), more, rows, [])
    for layer in rows:
        assert isinstance(layer, RowsKVCache)
        layer.cut([4 - number % 2 for number in range(len(prompts))])
    again = head.draft_block(newest, hidden, rows, COUNT)
    for row in range(0, len(prompts), 2):
        assert again[row].tolist() == alone[row][0].tolist()


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize(
    ("family", "variant"),
    few_of(
        [
            *((model_of(variant), variant) for variant in VARIANTS),
            ("lfm2_vl", "dspark"),
            ("lfm2", "dspark"),
        ],
        [("lfm2_vl", "dspark")],
    ),
)
def test_answers_drafted_in_blocks_equal_plain_answers(tmp_path: Path, family: str, variant: str):
    model = cached(family)
    head = write_random(variant, model, tmp_path / "head")
    drafted = engine_of(load_model(model, drafter=str(head)), num_draft_tokens=7)
    assert run_all(drafted, 2) == run_all(engine_of(load_model(model)))
    assert drafted.scheduler.stats().spec_trained_draft_tokens > 20


def test_block_head_beside_checkpoint_is_found(tmp_path: Path):
    (tmp_path / "model").symlink_to(cached("qwen3_5"))
    write_random("dflash", cached("qwen3_5"), tmp_path / "model-dflash")
    loaded = load_model(tmp_path / "model")
    assert head_of(loaded).name == "qwen3_dflash"
    model = ModelSettings(path=str(tmp_path / "model"))
    examined = examine(ExaminationRequest(model, MemorySettings()), 100)
    assert examined.drafter == "qwen3_dflash"
    assert examined.weight_bytes == loaded.size_bytes


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"hidden_size": 32}, "its hidden_size is 32, and the model's 64"),
    ("dflash", {"vocab_size": 7}, "its vocab_size is 7"),
    ("dflash", {IN_BLOCK: {"target_layer_ids": [0, 3]}}, "asks for layers"),
    ("dflash", {IN_BLOCK: {"target_layer_ids": ["0", "2"]}}, "does not fit"),
    ("dflash", {IN_BLOCK: {"mask_token_id": 1000}}, "no token 1000 for masks"),
    ("dflash", {IN_BLOCK: {"draft_window_size": "wide"}}, "does not fit"),
    ("dflash", {"block_size": 1}, "guesses nothing"),
    ("dflash", {"block_size": "8"}, "does not fit"),
    ("dflash", SLIDING | {"sliding_window": None}, "does not fit"),
    ("dflash", {"num_key_value_heads": 3}, "does not fit"),
]
"""A kind, what its `config.json` says otherwise, and the reason that it is refused."""


@pytest.mark.parametrize(("variant", "change", "reason"), few_of(BROKEN, BROKEN[:5]))
def test_block_head_that_does_not_fit_is_refused_or_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variant: str,
    change: dict[str, Any],
    reason: str,
):
    (tmp_path / "model").symlink_to(cached("qwen3_5"))
    changed = VARIANTS[variant] | change
    changed[IN_BLOCK] = VARIANTS[variant].get(IN_BLOCK, {}) | change.get(IN_BLOCK, {})
    fitting = {"target_layer_ids": [0, 2]} if "target_layer_ids" in changed[IN_BLOCK] else {}
    weights_of = changed | {IN_BLOCK: changed[IN_BLOCK] | fitting}
    weights_of |= {"sliding_window": WINDOW} if "layer_types" in changed else {}
    monkeypatch.setitem(VARIANTS, variant, weights_of)
    head = write_random(variant, tmp_path / "model", tmp_path / "model-dflash")
    config = json.loads((head / CONFIG).read_text())
    config |= changed | {IN_BLOCK: config[IN_BLOCK] | changed[IN_BLOCK]}
    (head / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=reason):
        load_model(tmp_path / "model", drafter=str(head))
    loaded, plain = (load_model(tmp_path / "model", drafter=name) for name in ("auto", "off"))
    assert loaded.draft_head is None
    assert loaded.size_bytes == plain.size_bytes
    assert reason in caplog.text
    examine(ExaminationRequest(ModelSettings(path=str(tmp_path / "model")), MemorySettings()), 100)


def test_block_head_with_impossible_numbers_is_none(tmp_path: Path):
    (tmp_path / "model").symlink_to(cached("qwen3_5"))
    head = tmp_path / "model-dflash"
    head.mkdir()
    text = json.dumps({"model_type": "qwen3", IN_BLOCK: {"markov_rank": math.inf}})
    (head / CONFIG).write_text(text)
    assert load_model(tmp_path / "model").draft_head is None


def test_found_head_is_left_out_where_memory_is_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "model").symlink_to(cached("qwen3_5"))
    head = write_random("dflash", tmp_path / "model", tmp_path / "model-dflash")
    sizes = [load_model(tmp_path / "model", drafter=name).size_bytes for name in ("auto", "off")]
    limit = sum(sizes) // 2
    assert load_model(tmp_path / "model", limit).draft_head is None
    assert "is not used" in caplog.text
    with pytest.raises(ModelLoadError):
        load_model(tmp_path / "model", limit, drafter=str(head))


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("variant", ["dspark", "dflash2"])
def test_block_head_of_model_that_appends_drafts(tmp_path: Path, variant: str):
    """Its prompts are prefilled together, into packed KV."""
    model = cached("qwen3_vl")
    head = write_random(variant, model, tmp_path / "head")
    storage = KVStorage(8, of_running=True)
    loaded, plain = (
        replace(load_model(model, drafter=name), kv_storage=storage) for name in (str(head), "off")
    )
    engine = engine_of(loaded, num_draft_tokens=7, max_prompts_per_prefill=8)
    assert run_all(engine) == run_all(engine_of(plain))
    assert engine.scheduler.stats().spec_trained_draft_tokens > 20
    together = new_engine_of((loaded, new_preparer(loaded)), num_draft_tokens=7)
    short = SamplingParams(max_tokens=1, temperature=0.0)
    for number in range(8):
        sampling = structs.replace(short, max_tokens=12) if number else short
        together.add(ask(f"q{number}", f"{number} Yes", sampling=sampling))
    together.run()
    assert not [end for end in together.ends.values() if isinstance(end, Failed)]
    assert max(together.runner.prompts_at_once) > 1
