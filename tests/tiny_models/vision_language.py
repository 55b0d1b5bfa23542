"""The recipe that vision-language checkpoints share: a decoder, a tower, and their processors."""

from __future__ import annotations

import copy
from typing import Any

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

HALF: Json = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
Files = dict[str, Json]


def words(text: str) -> tuple[str, ...]:
    """The tokens in `text`, between which are spaces."""
    return tuple(text.split())


def square(side: int) -> Json:
    return {"height": side, "width": side}


def images(name: str, kind: str = "", **settings: Any) -> Files:
    """The settings of `name`'s image processor; `kind` is whose it is, if it is another's."""
    names = {
        "image_processor_type": f"{kind or name}ImageProcessor",
        "processor_class": f"{name}Processor",
    }
    return {"preprocessor_config.json": names | settings}


def processor(name: str, **settings: Any) -> Files:
    return {"processor_config.json": {"processor_class": f"{name}Processor"} | settings}


def vision_family(
    specials: tuple[str, ...],
    architecture: str,
    model_type: str,
    text: Json,
    files: Files,
    *,
    template: str,
    ids: dict[str, str] | None = None,
    tokens: dict[str, str] | None = None,
    eos: tuple[str, ...] = chatml.EOS,
    pad: str = chatml.PAD,
    bos: str | None = None,
    style: Style | None = None,
    is_flat: bool = False,
    has_size: bool = True,
    num_spare: int = 0,
    size_names: tuple[str, ...] = ("vocab_size",),
    **config: Any,
) -> Family:
    """A family whose decoder is `text`; `config` has the rest of `config.json`.

    ids: tokens whose ids `config.json` has, by their names there (`part.name` in a part).
    is_flat: the decoder's settings are the model's. has_size: the model has the vocabulary's size,
    too. num_spare: rows that the decoder has beyond those of the tokens. size_names: what their
    number is called.
    """

    def describe(vocabulary: Vocabulary) -> Checkpoint:
        size = dict.fromkeys(size_names, len(vocabulary) + num_spare)
        decoder = size | text
        model = decoder if is_flat else {"text_config": decoder}
        if has_size and not is_flat:
            model["vocab_size"] = len(vocabulary) + num_spare
        names = {"architectures": [architecture], "model_type": model_type}
        made = model | names | copy.deepcopy(config)
        for name, token in (ids or {}).items():
            part, _, inner = name.rpartition(".")
            (made[part] if part else made)[inner] = vocabulary.id(token)
        return Checkpoint(
            config=made,
            template=template,
            eos=eos,
            pad=pad,
            files=files,
            tokens=tokens or {},
            style=style or Style(),
        )

    return Family(specials, describe, bos)
