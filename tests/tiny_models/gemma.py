"""Gemma 3 and 3n, PaliGemma: square images of one size.

The sizes of Gemma 3n's tower stand in mlx-vlm's code, and are those of 300 million parameters:
where this module is imported, they are smaller.
"""

from __future__ import annotations

from typing import Any

from mlx_vlm.models.gemma3n import vision

from tests.tiny_models.llama import decoder, vit
from tests.tiny_models.vision_language import HALF, images, processor, square, vision_family, words
from tests.tiny_models.weights import Style

SPECIALS = words(
    "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> "
    "<image_soft_token>"
)
SIDE = 112
TOKENS_PER_IMAGE = 16
WINDOW = 64

TEMPLATE = """\
{{- bos_token }}
{%- set first = '' %}
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
{%- set content = messages[0].content %}
{%- set first = (content if content is string else content[0].text) + '\\n\\n' %}
{%- set turns = messages[1:] %}
{%- endif %}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
{%- if message.content is string %}{{- message.content | trim }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<start_of_image>' }}
{%- elif part.type == 'text' %}{{- part.text | trim }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
EOS = ("<end_of_turn>", "<eos>")
IMAGE_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}

GEMMA3 = vision_family(
    SPECIALS,
    "Gemma3ForConditionalGeneration",
    "gemma3",
    decoder(
        "gemma3_text",
        num_hidden_layers=6,
        head_dim=16,
        query_pre_attn_scalar=16,
        rms_norm_eps=1e-6,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        mm_tokens_per_image=TOKENS_PER_IMAGE,
    ),
    images("Gemma3", size=square(SIDE), image_seq_length=TOKENS_PER_IMAGE, **HALF)
    | processor("Gemma3", image_seq_length=TOKENS_PER_IMAGE),
    template=TEMPLATE,
    ids={
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    tokens=IMAGE_TOKENS,
    eos=EOS,
    pad="<pad>",
    bos="<bos>",
    style=Style(tied_head=True, norm_offset=1.0),
    hidden_size=64,
    mm_tokens_per_image=TOKENS_PER_IMAGE,
    vision_config=vit("siglip_vision_model", 14, image_size=SIDE),
)
"""Sliding windows in every layer but each third."""


def _blocks() -> list[list[Any]]:
    return [
        [vision._er(3, 16, 2)],
        [vision._uir(3, 5, 32, 2, 2.0)],
        [vision._uir(5, 5, 32, 2, 2.0), vision._mmqa(2, 8, 2)],
        [vision._uir(5, 5, 32, 2, 2.0), vision._mmqa(2, 8, 1), vision._uir(0, 0, 32, 1, 2.0)],
    ]


SIDE_TOKENS = 4


class _SmallAdapter(vision.MobileNetV5MultiScaleFusionAdapter):  # type: ignore[misc]
    def __init__(self, **_: Any) -> None:
        super().__init__(in_chs=[64], out_chs=32, output_resolution=SIDE_TOKENS)


vision.gemma3n_mobilenet_def = _blocks
vision.MobileNetV5MultiScaleFusionAdapter = _SmallAdapter

_TEXT_3N = words(
    "<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn> <start_of_image> <start_of_audio>"
)
_BEYOND_3N = words("<end_of_image> <image_soft_token> <end_of_audio> <audio_soft_token>")
"""Beyond the text's vocabulary, with embeddings of their own."""
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA3N = vision_family(
    _TEXT_3N + _BEYOND_3N,
    "Gemma3nForConditionalGeneration",
    "gemma3n",
    decoder(
        "gemma3n_text",
        hidden_size_per_layer_input=32,
        intermediate_size=[128] * len(KINDS),
        num_hidden_layers=len(KINDS),
        num_kv_shared_layers=3,
        head_dim=16,
        laurel_rank=32,
        altup_num_inputs=3,
        activation_sparsity_pattern=[0.5] * 2 + [0.0] * 4,
        sliding_window=WINDOW,
        layer_types=KINDS,
        rms_norm_eps=1e-6,
    ),
    images("Gemma3n", "Siglip", size=square(64), do_normalize=False)
    | processor("Gemma3n", image_seq_length=SIDE_TOKENS**2),
    template=TEMPLATE.replace("'<start_of_image>' }}", "'<image_soft_token>' }}"),
    ids={
        "image_token_id": "<image_soft_token>",
        "image_token_index": "<image_soft_token>",
        "audio_token_id": "<audio_soft_token>",
        "text_config.vocab_size_per_layer_input": "<end_of_image>",
        "vision_config.vocab_offset": "<end_of_image>",
        "audio_config.vocab_offset": "<audio_soft_token>",
    },
    tokens=IMAGE_TOKENS
    | {
        "boa_token": "<start_of_audio>",
        "eoa_token": "<end_of_audio>",
        "audio_token": "<audio_soft_token>",
    },
    eos=EOS,
    pad="<pad>",
    bos="<bos>",
    style=Style(tied_head=True, tied_scale=1.0),
    hidden_size=64,
    vision_soft_tokens_per_image=SIDE_TOKENS**2,
    vision_config={"model_type": "gemma3n_vision", "hidden_size": 32, "vocab_size": 4},
    audio_config={
        "hidden_size": 32,
        "input_feat_size": 16,
        "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1,
        "sscp_conv_channel_size": [8, 8],
        "vocab_size": 4,
    },
)
"""Inputs for each layer, streams that alternate, and layers that share keys and values."""

EXTRA = (*(f"<loc{i:04}>" for i in range(1024)), *(f"<seg{i:03}>" for i in range(128)))
"""mlx-vlm's processor adds them where they are missing."""
_PALIGEMMA_TOKENS = (56 // 14) ** 2
PALIGEMMA = vision_family(
    (*words("<pad> <eos> <bos> <unk> <image>"), *EXTRA),
    "PaliGemmaForConditionalGeneration",
    "paligemma",
    decoder(
        "gemma2",
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=60.0,
        num_image_tokens=_PALIGEMMA_TOKENS,
    ),
    images("PaliGemma", "Siglip", image_seq_length=_PALIGEMMA_TOKENS, size=square(56), **HALF),
    template="",
    ids={"bos_token_id": "<bos>", "image_token_index": "<image>"},
    tokens={"image_token": "<image>"},
    eos=("<eos>",),
    pad="<pad>",
    bos="<bos>",
    style=Style(tied_head=True, norm_offset=1.0),
    has_size=False,
    hidden_size=64,
    projection_dim=64,
    vision_config={
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 64,
        "num_image_tokens": _PALIGEMMA_TOKENS,
    },
)
"""Images before the text; all tokens of a prompt see each other."""
