"""Step 3.7: one size of image, large images in windows too; sliding windows, gates, experts."""

from __future__ import annotations

from tests.tiny_models import chatml
from tests.tiny_models.checkpoint import Checkpoint, Family, Json
from tests.tiny_models.llama import llama
from tests.tiny_models.vocabulary import Vocabulary

SPECIALS = (
    *chatml.SPECIALS,
    "<im_patch>",
    "<im_start>",
    "<im_end>",
    "<patch_start>",
    "<patch_end>",
    "<patch_newline>",
)
WINDOW = 64


def _config(vocabulary: Vocabulary) -> Json:
    text = llama(
        len(vocabulary),
        model_type="step3p5",
        num_attention_groups=2,
        moe_intermediate_size=32,
        moe_num_experts=4,
        moe_top_k=2,
        moe_layers_enum="2,3",
        share_expert_dim=32,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] * 2,
        attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 1},
        use_head_wise_attn_gate=True,
        swiglu_limits=[0.0, 0.0, 0.0, 7.0],
        swiglu_limits_shared=[0.0] * 4,
        partial_rotary_factors=[0.5, 1.0] * 2,
    )
    return {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p7",
        "image_token_id": vocabulary.id("<im_patch>"),
        "understand_projector_stride": 2,
        "projector_bias": False,
        "vocab_size": len(vocabulary),
        "text_config": text,
        "vision_config": {
            "model_type": "perception_encoder",
            "width": 16,
            "layers": 2,
            "heads": 2,
            "image_size": 728,
            "patch_size": 14,
            "mlp_ratio": 2.0,
            "use_cls_token": False,
        },
    }


def _describe(vocabulary: Vocabulary) -> Checkpoint:
    return Checkpoint(
        config=_config(vocabulary),
        template=chatml.chatml("<im_patch>"),
        eos=chatml.EOS,
        pad=chatml.PAD,
        files={"processor_config.json": {"processor_class": "Step3VLProcessor"}},
    )


STEP3P7 = Family(SPECIALS, _describe)
