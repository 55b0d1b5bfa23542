"""Writes the random models that the figures in the documents were measured with, by name.

Each has the family, the shape and the size of vocabulary of a model that people run; `NAME-small`
has the same make at some 40 M parameters, for CPUs. Processors, templates and the first tokens are
those of the tiny models in `tests`; weights are drawn on the device, so that a GPU makes them in
seconds. `mid`, `agent`, `3b` and `1b` have a small vocabulary.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from bench_shapes import SHAPES, Json, Shape
from mlx.utils import tree_flatten
from mlx_vlm.convert import convert
from mlx_vlm.utils import get_model_and_args, update_module_configs

from tests.tiny_models import definition, make
from tests.tiny_models.checkpoint import write as write_tiny
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import (
    HEAD_GAIN,
    MODULES,
    QUIET_SCALE,
    Style,
    random_vector,
    scale_of,
)

_DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
_QUANTIZED_GROUP = 64
_FOR_CPUS = ("mid", "agent")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_models")
    parser.add_argument("name", choices=(*_FOR_CPUS, *SHAPES), help="the model", metavar="NAME")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantize, as mlx-vlm does")
    wanted = parser.parse_args()
    if wanted.bits is None:
        _write(wanted.name, wanted.out, wanted.seed)
    else:
        with TemporaryDirectory(dir=wanted.out.parent) as whole:
            _write(wanted.name, Path(whole), wanted.seed)
            group_size = _QUANTIZED_GROUP
            convert(
                whole, str(wanted.out), quantize=True, q_bits=wanted.bits, q_group_size=group_size
            )
    print(wanted.out)


def _write(name: str, folder: Path, seed: int) -> None:
    if name in _FOR_CPUS:
        make("qwen2_5_vl", folder, seed, name)
    else:
        write(folder, seed, SHAPES[name])


def write(folder: Path, seed: int, shape: Shape) -> None:
    """Write the checkpoint; the same seed gives the same weights on the same kind of device."""
    family = definition(shape.family)
    family = replace(family, specials=family.specials + shape.specials)
    write_tiny(family, folder, seed)
    words = Vocabulary(family.specials, family.bos)
    quiet = words.quiet_ids()
    config: Json = json.loads((folder / "config.json").read_text())
    config = _merged(config, shape.config)
    if shape.vocabulary_size:
        _add_words(folder, shape.vocabulary_size)
        config = _with_vocabulary(config, shape.vocabulary_size)
    _write_json(folder / "config.json", config)
    for name, settings in shape.files.items():
        _write_json(folder / name, _merged(json.loads((folder / name).read_text()), settings))
    mx.random.seed(seed)
    weights = _weights(config, quiet, family.describe(words).style, _DTYPES[shape.dtype], seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _merged(base: Json, changes: Json) -> Json:
    """`base`, in which `changes` replace what they name, also in objects within it."""
    made = dict(base)
    for name, value in changes.items():
        is_object = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = _merged(made[name], value) if is_object else value
    return made


def _with_vocabulary(config: Json, size: int) -> Json:
    made = {n: _with_vocabulary(v, size) if isinstance(v, dict) else v for n, v in config.items()}
    return made | {name: size for name in made if name.startswith("vocab_size")}


def _add_words(folder: Path, size: int) -> None:
    """Fill the tokenizer's vocabulary up to `size` with words of their own."""
    path = folder / "tokenizer.json"
    tokenizer: Json = json.loads(path.read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    words |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    taken = set(words.values())
    words |= {f"Ġw{number}": number for number in range(size) if number not in taken}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n")


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _weights(
    config: Json, quiet: list[int], style: Style, dtype: mx.Dtype, seed: int
) -> dict[str, mx.array]:
    """As `random_weights` of the tiny models, but on the device."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, default in sorted(_parameters(config).items()):
        if style.tied_head and name.endswith("lm_head.weight"):
            continue
        if default.ndim == 1:
            vector = random_vector(name, np.array(default.astype(mx.float32)), style, rng)
            weights[name] = mx.array(vector, dtype)
        else:
            scale = scale_of(name, default.shape, style)
            weights[name] = mx.random.normal(default.shape, dtype, scale=scale)
            mx.eval(weights[name])
    rows, kept = mx.array(quiet), 0.0  # specials, so that replies run to their limit
    if style.tied_head:
        head, kept = _only(weights, "embed_tokens.weight"), QUIET_SCALE
        weights[head] *= style.tied_scale
        norm = weights[_only(weights, style.last_norm)].astype(mx.float32) + style.norm_offset
        norm = norm * HEAD_GAIN / style.tied_scale - style.norm_offset
        weights[_only(weights, style.last_norm)] = norm.astype(dtype)
    else:
        head = _only(weights, "lm_head.weight")
        weights[head] *= HEAD_GAIN
    weights[head][rows] *= kept
    return weights


def _parameters(config: Json) -> dict[str, Any]:
    """Every parameter with its default, lazy: those of large ones are never computed."""
    config = {"audio_config": {}} | config
    module, _ = get_model_and_args(config=config)
    model_config = module.ModelConfig.from_dict(config)
    model_config = update_module_configs(model_config, module, config, MODULES)
    return dict(tree_flatten(module.Model(model_config).parameters()))


def _only(weights: dict[str, mx.array], suffix: str) -> str:
    (name,) = [n for n in weights if "language_model" in n and n.endswith(suffix)]
    return name


if __name__ == "__main__":
    main()
