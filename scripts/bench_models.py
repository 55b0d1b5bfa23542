"""Writes the random models that the figures in the documents were measured with.

`mid` is a shape of the tiny models. `3b` takes all but its sizes and weights from one: the
weights are drawn on the device, in bfloat16, so that a GPU makes them in seconds. `long` is made
likewise, for long prompts on a CPU: two layers. `1b` is for the time that a start takes: 1.3 GiB.
With `--words` their tokens are words and parts of words, as `bench_speculation` needs them.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs

from tests.tiny_models import make, vocabulary
from tests.tiny_models.qwen import SPECIALS
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import ATTENTION_GAIN, HEAD_GAIN

FAMILY = "qwen2_5_vl"
TEXT_3B = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "torch_dtype": "bfloat16",
}
VISION_3B = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "out_hidden_size": 2048,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
TEXT_LONG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40960,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}
VISION_LONG = {"out_hidden_size": 256}
TEXT_1B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 18,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "torch_dtype": "bfloat16",
}
VISION_1B = {
    "depth": 16,
    "hidden_size": 640,
    "num_heads": 8,
    "intermediate_size": 1710,
    "out_hidden_size": 1536,
    "fullatt_block_indexes": [3, 7, 11, 15],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_models")
    parser.add_argument("shape", choices=("mid", "3b", "long", "1b"))
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", action="store_true", help="a vocabulary of 4,096 tokens")
    wanted = parser.parse_args()
    if wanted.words:
        _use_words()
    if wanted.shape == "mid":
        make(FAMILY, wanted.out, wanted.seed, "mid")
    elif wanted.shape == "3b":
        write(wanted.out, wanted.seed, TEXT_3B, VISION_3B)
    elif wanted.shape == "1b":
        write(wanted.out, wanted.seed, TEXT_1B, VISION_1B)
    else:
        write(wanted.out, wanted.seed, TEXT_LONG, VISION_LONG)
    print(wanted.out)


def _use_words() -> None:
    """Train the tokenizer on the documentation: tokens as long as those of real models."""
    vocabulary.MERGES = 4096 - 256 - len(SPECIALS)
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    vocabulary.CORPUS = "\n".join(page.read_text() for page in pages)


def write(folder: Path, seed: int, text: dict[str, Any], vision: dict[str, Any]) -> None:
    """Write the checkpoint; the same seed gives the same weights on the same kind of device."""
    make(FAMILY, folder, seed)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = config | text | {"vision_config": config["vision_config"] | vision}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    mx.random.seed(seed)
    weights = {name: _draw(name, shape) for name, shape in sorted(_shapes(config).items())}
    quiet = mx.array(Vocabulary(SPECIALS).quiet_ids())
    head = weights["language_model.lm_head.weight"] * HEAD_GAIN
    head[quiet] = 0.0  # specials, so that replies run to their limit
    weights["language_model.lm_head.weight"] = head
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every parameter; none is evaluated, so this takes no memory."""
    module, _ = get_model_and_args(config=config)
    model_config = module.ModelConfig.from_dict(config)
    model_config = update_module_configs(model_config, module, config, ["text", "vision"])
    parameters = tree_flatten(module.Model(model_config).parameters())
    return {name: tuple(value.shape) for name, value in parameters}


def _draw(name: str, shape: tuple[int, ...]) -> mx.array:
    if len(shape) == 1:
        center = 0.0 if name.endswith("bias") else 1.0  # norms have no bias here
        return mx.random.normal(shape, mx.bfloat16, loc=center, scale=0.1)
    gain = ATTENTION_GAIN if "q_proj" in name or "k_proj" in name else 1.0
    return mx.random.normal(shape, mx.bfloat16, scale=gain / math.sqrt(math.prod(shape[1:])))


if __name__ == "__main__":
    main()
