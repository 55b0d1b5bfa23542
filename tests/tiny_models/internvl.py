"""InternVL: an image is cut into tiles of one size after its shape, then a small copy follows."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama, vit
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    *chatml.SPECIALS,
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<image>",
    "<video>",
)
TILE_PIXELS = 56
PATCH = 14
TOKENS_PER_TILE = (TILE_PIXELS // PATCH // 2) ** 2
MAX_TILES = 4


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": vocabulary.id("<IMG_CONTEXT>"),
        "downsample_ratio": 0.5,
        "max_dynamic_patch": MAX_TILES,
        "min_dynamic_patch": 1,
        "use_thumbnail": True,
        "text_config": llama(len(vocabulary), model_type="qwen3"),
        "vision_config": vit(
            "internvl_vision",
            [PATCH, PATCH],
            image_size=[TILE_PIXELS, TILE_PIXELS],
            layer_scale_init_value=1.0,
            norm_type="layer_norm",
            attention_bias=True,
            use_qk_norm=False,
        ),
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=chatml.chatml("<IMG_CONTEXT>\n"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "GotOcr2ImageProcessor",
                "processor_class": "InternVLProcessor",
                "size": {"height": TILE_PIXELS, "width": TILE_PIXELS},
                "min_patches": 1,
                "max_patches": MAX_TILES,
                "crop_to_patches": True,
            },
            "processor_config.json": {
                "processor_class": "InternVLProcessor",
                "image_seq_length": TOKENS_PER_TILE,
            },
        },
    )


INTERNVL = Family(SPECIALS, _describe)


def _describe_qwen2(vocabulary: Vocabulary) -> Checkpoint:
    internvl = _describe(vocabulary)
    text = llama(len(vocabulary), model_type="qwen2")
    return replace(internvl, config=internvl.config | {"text_config": text})


INTERNVL_QWEN2 = Family(SPECIALS, _describe_qwen2)


def _config_chat(vocabulary: Vocabulary) -> Json:
    """InternVL 3 and 3.5 as OpenGVLab writes them; they name no image token."""
    config = _config(vocabulary)
    vision = config["vision_config"] | {
        "model_type": "intern_vit_6b",
        "image_size": TILE_PIXELS,
        "patch_size": PATCH,
    }
    text = config["text_config"] | {"attention_bias": False}
    del config["image_token_id"], config["text_config"]
    return config | {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "force_image_size": TILE_PIXELS,
        "llm_config": text,
        "text_config": text,
        "vision_config": vision,
    }


def _describe_chat(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config_chat(vocabulary),
        template=chatml.chatml("<image>\n"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={"preprocessor_config.json": {"crop_size": TILE_PIXELS}},
    )


INTERNVL_CHAT = Family(SPECIALS, _describe_chat)
