"""Families that are refused: mlx-vlm 0.7.10 does what the reason says.

When one of these tests fails after an update of mlx-vlm, the family can be examined anew.
"""

from __future__ import annotations

import pkgutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import pytest
from mlx.utils import tree_map
from mlx_vlm.models import (
    deepseek_v41,
    ernie4_5_moe_vl,
    florence2,
    minimax_m3_vl,
    mllama,
    youtu_vl,
)
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.deepseek_v41.processing_deepseek_v41 import DeepseekV41Processor
from mlx_vlm.models.moondream2.processing_moondream2 import Moondream2Processor
from mlx_vlm.models.phi3_v.processing_phi3_v import Phi3VProcessor
from mlx_vlm.models.phi4mm.processing_phi4mm import IMAGE_TOKEN_INDEX, Phi4MMProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.images import random_image
from tests.tiny_models.checkpoint import write
from tests.tiny_models.fixtures import TinyModel
from tests.tiny_models.text import WINDOW, text_family
from tests.tiny_models.text_parts import INDEXED

DEEPSEEK_V4 = text_family(
    "DeepseekV4ForCausalLM",
    model_type="deepseek_v4",
    num_key_value_heads=1,
    head_dim=32,
    q_lora_rank=32,
    qk_rope_head_dim=8,
    o_groups=2,
    o_lora_rank=16,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    compress_ratios=[0, 4, 128, 4],
    num_hash_layers=0,
    hc_mult=2,
    hc_sinkhorn_iters=2,
    sliding_window=WINDOW,
    **INDEXED,
)
ERNIE = {
    "model_type": "ernie4_5_moe_vl",
    "vocab_size": 32,
    "im_patch_id": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {"mrope_section": [3, 3, 2]},
    "moe_num_experts": [4, 4],
    "moe_intermediate_size": [16, 16],
    "moe_layer_start_index": [0, 0],
    "moe_layer_end_index": [1, 1],
    "pixel_hidden_size": 32,
    "vision_config": {"depth": 1, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2},
}
MINIMAX_M3_TEXT = minimax_m3_vl.TextConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    dense_intermediate_size=32,
    shared_intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_hidden_layers=1,
    num_local_experts=2,
    num_experts_per_tok=1,
    moe_layer_freq=[0],
    sparse_attention_config={
        "use_sparse_attention": True,
        "sparse_index_dim": 16,
        "sparse_num_index_heads": 1,
        "sparse_topk_blocks": 1,
        "sparse_block_size": 8,
        "sparse_attention_freq": [1],
    },
)
MLLAMA_TEXT = mllama.TextConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    cross_attention_layers=[1],
)


@pytest.fixture
def tokenizer(tiny_model: TinyModel) -> PreTrainedTokenizerFast:
    """A tokenizer without a BOS."""
    found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(str(tiny_model("qwen2_5_vl")))
    return found


def test_deepseek_v4_answers_differ_with_chunks(tmp_path: Path):
    model, _ = mlx_vlm.load(str(write(DEEPSEEK_V4, tmp_path / "model", 0)))
    language_model = model.language_model
    token_ids = mx.arange(20)[None]

    def logits(size: int) -> mx.array:
        cache = make_prompt_cache(language_model)
        chunks = mx.split(token_ids, range(size, 20, size), axis=1)
        outputs = [language_model(chunk, cache=cache).logits for chunk in chunks]
        return outputs[-1][0, -1]

    assert mx.allclose(logits(20), logits(40), atol=1e-4)
    assert not mx.allclose(logits(20), logits(16), atol=1e-2)


def test_deepseek_v41_processor_gives_images_places_in_prompt(tokenizer: PreTrainedTokenizerFast):
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config = deepseek_v41.ModelConfig(image_token_id=image_id)
    processor = DeepseekV41Processor(tokenizer, chat_template="x", config=config)

    def start(text: str) -> int:
        (images,) = processor(text=text, images=[random_image(1)])["pixel_values"]
        return int(images[0].start)

    assert start("<|image_pad|>") < start("Look: <|image_pad|>")


def test_ernie_experts_for_images_are_asked_by_token_types_alone():
    config = ernie4_5_moe_vl.ModelConfig.from_dict(dict(ERNIE))
    for part, kind in (
        ("text_config", ernie4_5_moe_vl.TextConfig),
        ("vision_config", ernie4_5_moe_vl.VisionConfig),
    ):
        setattr(config, part, kind.from_dict(getattr(config, part)))
    language_model = ernie4_5_moe_vl.LanguageModel(config.text_config, config)
    token_ids = mx.array([[1, 3, 3, 2]])

    def logits(**arguments: Any) -> mx.array:
        output: mx.array = language_model(token_ids, **arguments).logits
        return output

    types = {"token_type_ids": token_ids == 3}
    as_text, with_types = logits(), logits(**types)
    for layer in language_model.layers:
        experts = layer.mlp.switch_mlp_1
        experts.update(tree_map(lambda array: array * 2, experts.parameters()))
    assert mx.array_equal(logits(), as_text)
    assert not mx.allclose(logits(**types), with_types)
    assert "token_type_ids" not in {field.name for field in fields(InputEmbeddingsFeatures)}


def test_youtu_vl_has_no_processor():
    names = {module.name for module in pkgutil.iter_modules(youtu_vl.__path__)}
    assert names == {"config", "language", "vision", "youtu_vl"}


def test_phi3_v_processor_drops_token_after_image(tokenizer: PreTrainedTokenizerFast):
    processor = Phi3VProcessor(tokenizer=tokenizer)
    found = processor(text="Look:<|image_1|>What is this?", images=[random_image(1)])
    token_ids = found["input_ids"][0].tolist()
    after = tokenizer.encode("What is this?")
    assert token_ids[-len(after) :] != after
    assert token_ids[1 - len(after) :] == after[1:]


@pytest.mark.parametrize("size", [64, 1000])
def test_phi4mm_image_is_one_token_of_any_size(tokenizer: PreTrainedTokenizerFast, size: int):
    processor = Phi4MMProcessor(tokenizer=tokenizer)
    found = processor(text="<|image_1|>What?", images=[random_image(1, size, size)])
    assert found["input_ids"][0].tolist().count(IMAGE_TOKEN_INDEX) == 1


@pytest.mark.parametrize(("padding", "is_equal"), [(8, True), (3, False)])
def test_minimax_m3_blocks_of_keys_begin_at_padding(padding: int, is_equal: bool):
    """Two rows, of which the shorter begins with padding: of a whole block, and of a part."""
    language_model = minimax_m3_vl.LanguageModel(MINIMAX_M3_TEXT)
    token_ids = mx.arange(30)[None] % 32
    caches = []
    for row in (token_ids, token_ids[:, padding:]):
        cache = make_prompt_cache(language_model)
        language_model(row, cache=cache)
        caches.append(cache)
    batch = [type(rows[0]).merge(list(rows)) for rows in zip(*caches, strict=True)]
    newest = mx.array([[5]])
    alone = language_model(newest, cache=caches[1]).logits[0]
    positions = mx.array([[30], [30 - padding]])  # else mlx-vlm counts from 0
    two = mx.concatenate([newest] * 2)
    together = language_model(two, cache=batch, position_ids=positions).logits[1]
    assert mx.allclose(alone, together, atol=1e-4).item() == is_equal


def test_mllama_answers_depend_on_states_beside_embeddings():
    language_model = mllama.LanguageModel(MLLAMA_TEXT)
    for layer in language_model.model.layers:
        if "cross_attn_attn_gate" in layer:
            layer.cross_attn_attn_gate = mx.ones((1,))

    def logits(states: mx.array) -> mx.array:
        output: mx.array = language_model(mx.array([[1, 2]]), cross_attention_states=states).logits
        return output

    states = mx.random.normal((1, 4, 32))
    assert not mx.allclose(logits(states), logits(-states))


def test_florence2_has_encoder():
    config = florence2.TextConfig(
        d_model=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_layers=1,
        decoder_layers=1,
        vocab_size=32,
    )
    language_model = florence2.LanguageModel(config)
    _, encoded = language_model.model(input_ids=mx.array([[1, 2, 3]]))
    assert encoded.shape == (1, 3, 32)


def test_moondream2_processor_trusts_code_of_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = list[tuple[str, bool]]()

    def from_pretrained(name: str, trust_remote_code: bool, **_: Any) -> None:
        asked.append((name, trust_remote_code))
        raise OSError("no network")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(OSError, match="no network"):
        Moondream2Processor.from_pretrained(str(tmp_path), trust_remote_code=False)
    assert asked == [("moondream/starmie-v1", True)]
