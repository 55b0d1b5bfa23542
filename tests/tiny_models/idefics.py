"""Idefics 3 and SmolVLM: an image is cut into tiles, and a small copy of it comes last.

Idefics 2: images of any shape, resampled to a fixed number of tokens.
"""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama, vit
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

TILE_PIXELS = 32
PATCH = 8
SCALE = 2
TOKENS_PER_TILE = (TILE_PIXELS // PATCH // SCALE) ** 2
LONGEST_EDGE = 2 * TILE_PIXELS
ROWS = COLS = LONGEST_EDGE // TILE_PIXELS
TILES = tuple(f"<row_{r}_col_{c}>" for r in range(1, ROWS + 1) for c in range(1, COLS + 1))
IMAGE = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
BEGIN = "<|begin_of_text|>"

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


def _config(vocabulary: Vocabulary, model_type: str, vision_type: str) -> Json:
    return {
        "model_type": model_type,
        "vocab_size": len(vocabulary),
        "image_token_id": vocabulary.id("<image>"),
        "scale_factor": SCALE,
        "text_config": llama(len(vocabulary)),
        "vision_config": vit(vision_type, PATCH, image_size=TILE_PIXELS),
    }


def _processors(name: str) -> dict[str, Json]:
    return {
        "preprocessor_config.json": {
            "image_processor_type": f"{name}ImageProcessor",
            "processor_class": f"{name}Processor",
            "size": {"longest_edge": LONGEST_EDGE},
            "max_image_size": {"longest_edge": TILE_PIXELS},
            "do_image_splitting": True,
            "do_pad": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "processor_config.json": {
            "processor_class": f"{name}Processor",
            "image_seq_len": TOKENS_PER_TILE,
        },
    }


def _checkpoint(vocabulary: Vocabulary, name: str, start: str, pad: str) -> Checkpoint:
    model_type = name.lower()
    return Checkpoint(
        config={"architectures": [f"{name}ForConditionalGeneration"]}
        | _config(vocabulary, model_type, f"{model_type}_vision"),
        template=TEMPLATE.replace("START", repr(start)),
        eos=("<end_of_utterance>", pad),
        pad=pad,
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        files=_processors(name),
    )


def _smolvlm(vocabulary: Vocabulary) -> Checkpoint:
    return _checkpoint(vocabulary, "SmolVLM", start="<|im_start|>", pad="<|im_end|>")


def _idefics3(vocabulary: Vocabulary) -> Checkpoint:
    return _checkpoint(vocabulary, "Idefics3", start=BEGIN, pad="<|end_of_text|>")


SMOLVLM = Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE, *TILES), _smolvlm)
IDEFICS3 = Family((BEGIN, "<|end_of_text|>", *IMAGE, *TILES), _idefics3, bos=BEGIN)


def _idefics2(vocabulary: Vocabulary) -> Checkpoint:
    made = _checkpoint(vocabulary, "Idefics2", start=BEGIN, pad="<|end_of_text|>")
    perceiver = {
        "model_type": "idefics2_perceiver",
        "num_key_value_heads": 2,
        "resampler_depth": 2,
        "resampler_head_dim": 16,
        "resampler_n_heads": 4,
        "resampler_n_latents": TOKENS_PER_TILE,
    }
    vision = made.config["vision_config"] | {"image_size": 2 * TILE_PIXELS}
    images = made.files["preprocessor_config.json"] | {
        "size": {"longest_edge": LONGEST_EDGE, "shortest_edge": TILE_PIXELS},
        "do_image_splitting": False,
    }
    del images["max_image_size"]
    return replace(
        made,
        config=made.config | {"perceiver_config": perceiver, "vision_config": vision},
        files=made.files | {"preprocessor_config.json": images},
        tokens={},
        style=Style(last_norm="norm.weight"),
    )


IDEFICS2 = Family((BEGIN, "<|end_of_text|>", *IMAGE[:3]), _idefics2, bos=BEGIN)
