"""An assistant guesses by the model's own KV, in whatever batch that lies; see also
`test_trained_drafter.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.drafters import load_drafter
from safetensors.numpy import load_file, save_file

from tests.integration.harness import load_model
from tests.integration.seen_prompt import SeenPrompt
from tests.integration.test_trained_drafter import (
    STRENGTH_OF_GEMMA,
    engine_of,
    mute,
    num_accepted,
    often,
    run_all,
)
from tests.tiny_models import cached
from tests.tiny_models.draft_heads import CONFIG, WEIGHTS, with_weak_layers, write_assistant
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.errors import ModelLoadError
from vlm_server.runner.drafters.draft_head import DraftHead
from vlm_server.runner.kv import batch_cache
from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.loaded import LoadedModel

__all__ = ["mute", "often"]

WINDOW = 64
COUNT = 3
"""Guesses at a time."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma") / "model"
    return with_weak_layers(cached("gemma4"), folder, STRENGTH_OF_GEMMA)


def head_of(loaded: LoadedModel) -> DraftHead:
    assert loaded.draft_head is not None
    return loaded.draft_head


def guesses(
    loaded: LoadedModel, layers: list[Any], token_ids: mx.array, hidden: mx.array
) -> tuple[list[list[int]], mx.array]:
    """The guesses of each row, and the states of the last one."""
    head, tokens = head_of(loaded), list[mx.array]()
    for _ in range(COUNT):
        hidden = head.append_text(token_ids, hidden, head.layers_of(layers), [])
        token_ids = head.guess(hidden)
        tokens.append(token_ids)
    return mx.concatenate(tokens, axis=1).tolist(), hidden


@pytest.mark.parametrize("num_centroids", [0, 379], ids=["all tokens", "groups of tokens"])
@pytest.mark.parametrize("bits", [None, 4])
def test_guesses_equal_those_of_mlx_vlms_assistant(
    model: Path, tmp_path: Path, num_centroids: int, bits: int | None
):
    """Beyond the window, mlx-vlm's first guesses after a prompt see one token more."""
    folder = write_assistant(model, tmp_path / "head", is_idle=False, num_centroids=num_centroids)
    target = model if bits is None else cached("gemma4", bits=bits)
    loaded, drafter = load_model(target, drafter=str(folder)), load_drafter(str(folder))[0]
    drafter.reset(loaded.model)
    pairs = list[tuple[int, int]]()
    for seed, count in enumerate((1, 5, 40, WINDOW - 1, 80, 150)):
        prompt = SeenPrompt(loaded, count, seed)
        language_model = loaded.language_model
        cache, shared = make_prompt_cache(language_model), dict[str, Any]()
        language_model(prompt.token_ids, cache=cache, shared_kv_sink=shared)
        drafter.set_shared_kv(shared, count, position=count - 1, kv_valid_len=count)
        first = prompt.newest
        drafted = drafter.draft_block(first, prompt.hidden, None, COUNT + 1, greedy, greedy=True)
        [own], _ = guesses(loaded, prompt.layers, mx.array([[first]]), prompt.hidden)
        pairs += zip(own, drafted[0].tolist(), strict=True)
        if count < WINDOW:
            assert own == drafted[0].tolist()
    assert sum(own == other for own, other in pairs) > 0.8 * len(pairs)
    assert len({own for own, _ in pairs}) > 5


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


@pytest.mark.parametrize("storage", [EXACT, KVStorage(8, of_running=True)], ids=["exact", "8 bits"])
@pytest.mark.parametrize("counts", [(40,), (5, 90, 40), (70, 150), (200, 66, 3, 3)])
def test_guesses_in_batch_equal_those_alone(
    model: Path, tmp_path: Path, counts: Sequence[int], storage: KVStorage
):
    """Of rows of all lengths, and after some of them lost tokens."""
    folder = write_assistant(model, tmp_path / "head", is_idle=False)
    loaded = replace(load_model(model, drafter=str(folder)), kv_storage=storage)
    prompts = [SeenPrompt(loaded, count, seed) for seed, count in enumerate(counts)]
    alone = [
        guesses(loaded, each.layers, mx.array([[each.newest]]), each.hidden) for each in prompts
    ]
    rows: list[Any] = []
    for number, prompt in enumerate(prompts):
        rows = batch_cache.join(rows, number, prompt.layers, 1)
    newest = mx.array([[each.newest] for each in prompts])
    hidden = mx.concatenate([each.hidden for each in prompts])
    check_equal(guesses(loaded, rows, newest, hidden), alone)
    if len(prompts) > 1:  # the batch goes on, and rejects some of its tokens
        loaded.language_model(mx.zeros((len(prompts), 4), mx.int32), cache=rows)
        for layer in rows:
            assert isinstance(layer, RowsKVCache)
            layer.cut([4 - number % 2 for number in range(len(prompts))])
        found, states = guesses(loaded, rows, newest, hidden)
        for row in range(0, len(prompts), 2):
            check_equal(([found[row]], states[row : row + 1]), [alone[row]])


def check_equal(
    found: tuple[list[list[int]], mx.array], wanted: list[tuple[list[list[int]], mx.array]]
) -> None:
    assert found[0] == [tokens for rows, _ in wanted for tokens in rows]
    for row, (_, states) in enumerate(wanted):
        np.testing.assert_allclose(found[1][row : row + 1], states, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("mute")
@pytest.mark.parametrize("family", ["gemma4", "gemma4_text", "gemma4_unified"])
def test_assistant_beside_checkpoint_is_found_and_drafts(tmp_path: Path, family: str):
    model = with_weak_layers(cached(family), tmp_path / "model", STRENGTH_OF_GEMMA)
    wanted = run_all(engine_of(load_model(model))) if family != "gemma4_text" else None
    write_assistant(model, tmp_path / "model-assistant")
    drafted = load_model(model)
    assert head_of(drafted).name == "gemma4_assistant"
    if wanted is None:
        return
    engine = engine_of(drafted, num_draft_tokens=7)
    assert run_all(engine, 2) == wanted
    assert num_accepted(engine) > 5


def test_assistant_with_impossible_tokens_is_refused(model: Path, tmp_path: Path):
    head = write_assistant(model, tmp_path / "head", num_centroids=379)
    weights = load_file(head / WEIGHTS)
    weights["masked_embedding.token_ordering"][5] = 10**9
    save_file(weights, head / WEIGHTS)
    with pytest.raises(ModelLoadError, match="orders tokens that are none"):
        load_model(model, drafter=str(head))


@pytest.mark.parametrize("family", ["qwen3_vl", "llama", "gemma3"])
def test_assistant_of_other_model_is_refused(model: Path, tmp_path: Path, family: str):
    head = write_assistant(model, tmp_path / "head")
    with pytest.raises(ModelLoadError, match="is one of another model"):
        load_model(cached(family), drafter=str(head))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["chunked_attention", "full_attention"]}, "lacks: {'chunked_attention'}"),
        ({"num_attention_heads": 1, "head_dim": 64}, "does not fit"),
    ],
)
def test_assistant_with_other_layers_is_refused(
    model: Path, tmp_path: Path, change: dict[str, Any], reason: str
):
    head = write_assistant(model, tmp_path / "head")
    config = json.loads((head / CONFIG).read_text())
    config["text_config"] |= change
    (head / CONFIG).write_text(json.dumps(config))
    if "head_dim" in change:
        weights = load_file(head / WEIGHTS)
        for name, array in weights.items():
            if name.endswith("q_norm.weight"):
                weights[name] = np.ones(64 if "layers.0" in name else 32, np.float32)
            elif "layers.1.self_attn" in name:
                weights[name] = array[:32] if "q_proj" in name else array[:, :32]
        save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, head / WEIGHTS)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(model, drafter=str(head))
