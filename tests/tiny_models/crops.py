"""Families with overlapping crops of an image after a small copy of it: Molmo's line."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.llama import decoder, llama
from tests.tiny_models.vision_language import HALF, images, square, vision_family, words
from tests.tiny_models.weights import Style

PATCH = 14
CROP = 112
HEADLESS = words("<im_start> <im_end> <im_patch> <im_col>")
"""Image tokens without a row of the head."""
MOLMO = vision_family(
    (*chatml.SPECIALS, *HEADLESS),
    "MolmoForCausalLM",
    "molmo",
    {
        "model_type": "molmo",
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "mlp_hidden_size": 256,
        "additional_vocab_size": len(HEADLESS),
    },
    images(
        "Molmo",
        max_crops=3,
        overlap_margins=[2, 2],
        base_image_input_size=[CROP, CROP],
        image_token_length_w=4,
        image_token_length_h=4,
        image_patch_size=PATCH,
    ),
    template="",
    style=Style(embedding="wte.embedding", head="language_model.model.ff_out.weight"),
    has_size=False,
    num_spare=-len(HEADLESS),
    size_names=("vocab_size", "embedding_size"),
    vision_config={
        "model_type": "molmo",
        "image_default_input_size": [CROP, CROP],
        "image_patch_size": PATCH,
        "image_pos_patch_size": PATCH,
        "hidden_size": 128,
        "image_emb_dim": 32,
        "image_num_heads": 2,
        "image_num_key_value_heads": 2,
        "image_num_layers": 3,
        "image_head_dim": 16,
        "image_mlp_dim": 64,
        "image_num_pos": (CROP // PATCH) ** 2 + 1,
        "d_model": 64,
        "vit_layers": [-1, -3],
    },
)

CROP2 = 56
HEADLESS2 = (*HEADLESS, *words("<low_res_im_start> <|image|> <im_low> <frame_start> <frame_end>"))
TOWER2 = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}
MOLMO2 = vision_family(
    (*chatml.SPECIALS, *HEADLESS2),
    "Molmo2ForConditionalGeneration",
    "molmo2",
    decoder(
        "molmo2_text",
        additional_vocab_size=len(HEADLESS2),
        head_dim=16,
        layer_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_qk_norm=True,
        qk_norm_type="qwen3",
    ),
    images(
        "Molmo2",
        size=square(CROP2),
        max_crops=3,
        overlap_margins=[1, 1],
        patch_size=PATCH,
        pooling_size=[2, 2],
        **HALF,
    ),
    template=chatml.chatml("<|image|>"),
    ids={
        "image_start_token_id": "<im_start>",
        "low_res_image_start_token_id": "<low_res_im_start>",
        "image_end_token_id": "<im_end>",
        "image_low_res_id": "<im_low>",
        "image_patch_id": "<im_patch>",
        "image_col_id": "<im_col>",
        "frame_start_token_id": "<frame_start>",
        "frame_end_token_id": "<frame_end>",
    },
    style=Style(embedding="wte.embedding"),
    has_size=False,
    num_spare=-len(HEADLESS2),
    vit_config=TOWER2
    | {
        "model_type": "molmo2",
        "num_hidden_layers": 3,
        "image_patch_size": PATCH,
        "image_num_pos": (CROP2 // PATCH) ** 2,
        "image_default_input_size": [CROP2, CROP2],
    },
    adapter_config=TOWER2 | {"text_hidden_size": 64, "vit_layers": [-1, -3]},
)

JINA_VLM = vision_family(
    (*chatml.SPECIALS, *words("<im_patch> <im_start> <im_end> <im_col> <|image|>")),
    "JinaVLMForConditionalGeneration",
    "jvlm",
    llama("jina_vlm", num_hidden_layers=3, additional_vocab_size=1),
    {
        "preprocessor_config.json": {
            "base_input_size": [CROP, CROP],
            "patch_size": PATCH,
            "max_crops": 4,
            "overlap_margins": [2, 2],
        }
    },
    template=chatml.chatml("<|image|>"),
    style=Style(last_norm="ln_f.weight"),
    num_spare=-1,
    vision_config={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "patch_size": PATCH,
        "image_size": CROP,
        "vit_layers": [-1, -2],
        "output_size": 64,
        "connector_hidden_size": 64,
    },
)
"""Its configuration is by mlx-vlm's names: it reads none of those of published checkpoints, whose
numbers are its defaults. `<|image|>` alone is in its second table of tokens."""
