"""What a checkpoint folder holds, and how it is written. Knows no family."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style, random_weights, save

Json = dict[str, Any]
MAX_POSITIONS = 8192


@dataclass(frozen=True)
class Checkpoint:
    """The files of one model, but for its weights and its tokenizer.

    `template` is empty where its family's checkpoints have none. `tokens` are the attributes the
    processor asks of the tokenizer (`image_token`, ...).
    `files` are further JSON files by name: the processors' settings.
    `module` is mlx-vlm's of the weights, where the configuration names another; `model_class` is
    the model's in it.
    `tokenizer` has further settings of the tokenizer.
    `folders` are of weights that lie in a folder each, by their names in the module.
    """

    config: Json
    template: str
    eos: tuple[str, ...]
    pad: str
    files: dict[str, Json]
    tokens: dict[str, str] = field(default_factory=dict)
    style: Style = field(default_factory=Style)
    module: str = ""
    model_class: str = "Model"
    folders: dict[str, str] = field(default_factory=dict)
    tokenizer: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """The recipe of a family's checkpoint from the vocabulary that its `specials` give.

    `words`: see `Vocabulary`.
    """

    specials: tuple[str, ...]
    describe: Callable[[Vocabulary], Checkpoint]
    bos: str | None = None
    words: tuple[str, ...] = ()


MAKERS = ("checkpoint.py", "vocabulary.py", "weights.py")
"""Modules here that turn a definition into files."""


def definition_key(family: Family, *options: object) -> str:
    """A hash of all that decides what `write` makes of `family`; `options` are what follows it."""
    vocabulary = Vocabulary(family.specials, family.bos, family.words)
    sources = [(Path(__file__).parent / name).read_text() for name in MAKERS]
    versions = [version(name) for name in ("mlx", "mlx-vlm", "numpy")]
    parts = [
        family.specials,
        family.bos,
        family.words,
        family.describe(vocabulary),
        versions,
        sources,
        options,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def write(family: Family, folder: Path, seed: int) -> Path:
    """Write every file of a random checkpoint into `folder`; the same seed, the same bytes."""
    vocabulary = Vocabulary(family.specials, family.bos, family.words)
    made = family.describe(vocabulary)
    eos = [vocabulary.id(token) for token in made.eos]
    config = made.config | {"eos_token_id": eos, "pad_token_id": vocabulary.id(made.pad)}
    files = made.files | {
        "config.json": config,
        "tokenizer_config.json": _tokenizer_config(family, made),
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": eos,
            "pad_token_id": vocabulary.id(made.pad),
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "tokenizer.json").write_text(vocabulary.to_json())
    if made.template:
        (folder / "chat_template.jinja").write_text(made.template)
    spare = range(len(vocabulary), config.get("vocab_size", 0))  # rows without a token
    quiet = [*vocabulary.quiet_ids(), *spare]
    described = json.loads(json.dumps(config)) | (
        {"model_type": made.module} if made.module else {}
    )
    weights = random_weights(described, quiet, made.style, seed, made.model_class)
    for name, inner in made.folders.items():
        (folder / inner).mkdir(exist_ok=True)
        save({"linear.weight": weights.pop(name)}, folder / inner / "model.safetensors")
    save(weights, folder / "model.safetensors")
    return folder


def _tokenizer_config(family: Family, made: Checkpoint) -> Json:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": made.eos[0],
        "pad_token": made.pad,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "extra_special_tokens": made.tokens,
        **made.tokenizer,
    }
