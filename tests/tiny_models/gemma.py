"""Gemma 3: square images of one size, sliding windows in every layer but each third."""

from __future__ import annotations

from tests.tiny_models.checkpoint import MAX_POSITIONS, Checkpoint, Family, Json
from tests.tiny_models.llama import vit
from tests.tiny_models.vocabulary import Vocabulary
from tests.tiny_models.weights import Style

SPECIALS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
IMAGE_SIDE_PIXELS = 112
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


def _config(vocabulary: Vocabulary) -> Json:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "mm_tokens_per_image": TOKENS_PER_IMAGE,
        "image_token_index": vocabulary.id("<image_soft_token>"),
        "boi_token_index": vocabulary.id("<start_of_image>"),
        "eoi_token_index": vocabulary.id("<end_of_image>"),
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "rms_norm_eps": 1e-6,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "mm_tokens_per_image": TOKENS_PER_IMAGE,
            "max_position_embeddings": MAX_POSITIONS,
        },
        "vision_config": vit("siglip_vision_model", 14, image_size=IMAGE_SIDE_PIXELS),
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=TEMPLATE,
        eos=("<end_of_turn>", "<eos>"),
        pad="<pad>",
        tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor",
                "processor_class": "Gemma3Processor",
                "size": {"height": IMAGE_SIDE_PIXELS, "width": IMAGE_SIDE_PIXELS},
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
                "image_seq_length": TOKENS_PER_IMAGE,
            },
            "processor_config.json": {
                "processor_class": "Gemma3Processor",
                "image_seq_length": TOKENS_PER_IMAGE,
            },
        },
        style=Style(tied_head=True, norm_offset=1.0),
    )


GEMMA3 = Family(SPECIALS, _describe, bos="<bos>")
