"""Rows of families that read images and texts, and write."""

from __future__ import annotations

from dataclasses import replace

from vlm_server.runner.families.corrections import (
    features,
    gemma4,
    glm5,
    idefics2,
    jina,
    llama4,
    molmo,
    paligemma,
    processors,
)
from vlm_server.runner.families.embedding import YesOrNo
from vlm_server.runner.families.family import Family, MRopeRule, Spelling
from vlm_server.runner.model.deepstack import Deepstack
from vlm_server.runner.vision.tiles import LayeredTiling, PackedTiling, Tiling, UnequalTiling
from vlm_server.runner.vision.towers import DeepstackTower, FrameTower, GlmTower, WindowTower

_PREFIXES_SINCE_4_52 = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.visual.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
"""Names that begin otherwise stay as they are."""
_SINCE_4_52 = Spelling(weight_prefixes=_PREFIXES_SINCE_4_52)


def qwen(name: str, mrope: MRopeRule, tower: type[FrameTower]) -> Family:
    """The row of one of Qwen's families."""
    return Family(
        name,
        takes_videos=True,
        mrope=mrope,
        tower=tower,
        grounding_tokens=1024,
        coordinates="pixels" if name == "qwen2_5_vl" else "thousandths",
        spelling=Spelling(vision_type=name),
    )


def _qwen2(name: str, tower: type[FrameTower]) -> Family:
    row = qwen(name, MRopeRule.WHOLE_VIDEOS, tower)
    return replace(row, is_shardable=True, spelling=Spelling(True, name, _PREFIXES_SINCE_4_52))


def _glm(name: str) -> Family:
    return Family(name, mrope=MRopeRule.WHOLE_VIDEOS, tower=GlmTower)


VISION_LANGUAGE_ROWS = (
    Family("aya_vision", is_shardable=True, tiling=Tiling(axis=0)),
    Family("dots_ocr", is_shardable=True, fix=processors.look_up_image_token),
    Family("fastvlm", image_text="<image>\n", aliases=("llava_qwen2",)),
    Family("gemma3", is_shardable=True, spelling=_SINCE_4_52, stacks_images=True),
    Family("gemma3n", fix=features.embed_as_trained, stacks_images=True),
    Family("gemma4", fix=gemma4.correct, stacks_images=True),
    Family("gemma4_unified", fix=gemma4.correct_unified, stacks_images=True),
    Family("glm5_next", fix=glm5.correct),
    _glm("glm4v"),
    _glm("glm4v_moe"),
    replace(_glm("glm_ocr"), tower=None),
    Family(
        "granite4_vision",
        tiling=LayeredTiling(axis=1),
        deepstack=Deepstack.BY_PLACE,
        fix=features.name_deepstack_layers,
    ),
    Family("idefics2", fix=idefics2.correct, image_mark=idefics2.MARK),
    Family("idefics3", is_shardable=True, tiling=Tiling(axis=1)),
    Family(
        "internvl",
        tiling=Tiling(axis=1),
        text_types=("qwen2", "qwen3"),
        other_texts=("qwen2",),
        spelling=_SINCE_4_52,
    ),
    Family(
        "internvl_chat",
        is_shardable=True,
        tiling=Tiling(axis=1),
        text_types=("qwen2", "qwen3"),
        fix=processors.name_image_context,
    ),
    Family(
        "jina_vlm",
        fix=jina.correct,
        image_token=jina.IMAGE,
        frame_tokens=jina.FRAME,
        aliases=("jvlm",),
    ),
    Family("kimi_k25", fix=processors.read_settings),
    Family("kimi_vl", fix=processors.read_settings),
    Family("lfm2_vl", tiling=UnequalTiling(axis=0), aliases=("lfm2-vl",)),
    Family("llama4", fix=llama4.correct),
    Family(
        "llava",
        is_shardable=True,
        fix=processors.drop_tokenizer_options,
        spelling=_SINCE_4_52,
        stacks_images=True,
    ),
    Family(
        "llava_next",
        fix=features.pack_tiles,
        tiling=PackedTiling(axis=1),
        spelling=Spelling(
            weight_prefixes=_PREFIXES_SINCE_4_52 | {"model.image_newline": "image_newline"}
        ),
    ),
    Family("llava_onevision", is_shardable=True, tiling=PackedTiling(axis=1)),
    Family(
        "minicpmo",
        mrope=MRopeRule.IN_ORDER,
        fix=processors.use_images_alone,
        placeholder="<image>./</image>",
        image_token="<unk>",  # noqa: S106 - of an image
        frame_tokens=("<image>", "</image>"),
    ),
    Family("mistral3", is_shardable=True),
    Family(
        "paddleocr_vl",
        is_shardable=True,
        mrope=MRopeRule.WHOLE_VIDEOS,
        spelling=Spelling(has_flat_config=True, vision_type="paddleocr_vl"),
    ),
    Family(
        "molmo",
        fix=molmo.correct,
        chat_template=molmo.TEMPLATE,
        image_token=molmo.IMAGE,
        frame_tokens=("<im_start>", "<im_end>"),
    ),
    Family(
        "molmo2",
        fix=molmo.look_up_both_tables,
        image_token=molmo.IMAGE,
        frame_tokens=("<im_start>", "<low_res_im_start>", "<im_end>"),
    ),
    Family("nemotron_h_nano_omni", stacks_images=True),
    Family("paligemma", fix=paligemma.correct, chat_template=paligemma.TEMPLATE),
    Family("pixtral", is_shardable=True, spelling=_SINCE_4_52),
    _qwen2("qwen2_vl", FrameTower),
    _qwen2("qwen2_5_vl", WindowTower),
    replace(
        qwen("qwen3_vl", MRopeRule.SPLIT_VIDEOS, DeepstackTower),
        is_shardable=True,
        judges=YesOrNo(
            "Given a search query, retrieve relevant candidates that answer the query.",
            before_query="<Query>:",
            before_document="\n<Document>:",
        ),
    ),
    replace(qwen("qwen3_vl_moe", MRopeRule.SPLIT_VIDEOS, DeepstackTower), needs_even_rows=True),
    *(
        replace(qwen(name, MRopeRule.SPLIT_VIDEOS, DeepstackTower), needs_even_rows=True)
        for name in ("qwen3_5", "qwen3_5_moe")
    ),
    Family(
        "qwen3_omni_moe",
        mrope=MRopeRule.SPLIT_VIDEOS,
        tower=DeepstackTower,
        part="thinker",
        needs_even_rows=True,
        deepstack=Deepstack.ALL_ROWS,
    ),
    Family("step3p7"),
    Family("smolvlm", is_shardable=True, tiling=Tiling(axis=1)),
)
