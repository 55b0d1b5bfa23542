"""Idefics 3 and SmolVLM: an image is cut into tiles, and a small copy of it comes last.

Idefics 2: images of any shape, resampled to a fixed number of tokens.
"""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models.checkpoint import Checkpoint, Family
from tests.tiny_models.llama import llama, vit
from tests.tiny_models.vision_language import HALF, images, processor, vision_family, words
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

TILE_PIXELS = 32
PATCH = 8
SCALE = 2
TOKENS_PER_TILE = (TILE_PIXELS // PATCH // SCALE) ** 2
LONGEST_EDGE = 2 * TILE_PIXELS
TILES = words("<row_1_col_1> <row_1_col_2> <row_2_col_1> <row_2_col_2>")
IMAGE = words("<fake_token_around_image> <image> <end_of_utterance> <global-img>")
BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"

TEMPLATE = """\
{{- START }}
{%- for message in messages %}
{%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string
   else message.content %}
{{- message.role | capitalize + (':' if parts and parts[0].type == 'image' else ': ') }}
{%- for part in parts %}
{%- if part.type == 'text' %}{{- part.text }}
{%- elif part.type == 'image' %}{{- '<image>' }}
{%- endif %}
{%- endfor %}
{{- '<end_of_utterance>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}
"""


def _family(name: str, start: str, pad: str, specials: tuple[str, ...], bos: str | None) -> Family:
    return vision_family(
        specials,
        f"{name}ForConditionalGeneration",
        name.lower(),
        llama(),
        images(
            name,
            size={"longest_edge": LONGEST_EDGE},
            max_image_size={"longest_edge": TILE_PIXELS},
            do_image_splitting=True,
            do_pad=True,
            **HALF,
        )
        | processor(name, image_seq_len=TOKENS_PER_TILE),
        template=TEMPLATE.replace("START", repr(start)),
        ids={"image_token_id": "<image>"},
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        eos=("<end_of_utterance>", pad),
        pad=pad,
        bos=bos,
        scale_factor=SCALE,
        vision_config=vit(f"{name.lower()}_vision", PATCH, image_size=TILE_PIXELS),
    )


_SMOL = words("<|endoftext|> <|im_start|> <|im_end|>")
SMOLVLM = _family("SmolVLM", "<|im_start|>", "<|im_end|>", (*_SMOL, *IMAGE, *TILES), None)
IDEFICS3 = _family("Idefics3", BEGIN, END, (BEGIN, END, *IMAGE, *TILES), BEGIN)
_IDEFICS2 = _family("Idefics2", BEGIN, END, (BEGIN, END, *IMAGE[:3]), BEGIN)


def _idefics2(vocabulary: Vocabulary) -> Checkpoint:
    made = _IDEFICS2.describe(vocabulary)
    perceiver = {
        "model_type": "idefics2_perceiver",
        "num_key_value_heads": 2,
        "resampler_depth": 2,
        "resampler_head_dim": 16,
        "resampler_n_heads": 4,
        "resampler_n_latents": TOKENS_PER_TILE,
    }
    vision = made.config["vision_config"] | {"image_size": 2 * TILE_PIXELS}
    settings = made.files["preprocessor_config.json"] | {
        "size": {"longest_edge": LONGEST_EDGE, "shortest_edge": TILE_PIXELS},
        "do_image_splitting": False,
    }
    del settings["max_image_size"]
    return replace(
        made,
        config=made.config | {"perceiver_config": perceiver, "vision_config": vision},
        files=made.files | {"preprocessor_config.json": settings},
        tokens={},
        style=Style(last_norm="norm.weight"),
    )


IDEFICS2 = replace(_IDEFICS2, describe=_idefics2)
