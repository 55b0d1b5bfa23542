"""The table of families of mlx-vlm: one row for each `model_type`, looked up once, at load.

No other module names a family or asks a model what it can do. To add one: CONTRIBUTING.md. A family
without a row is probed (`probe.py`), and served with a warning.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_vlm.utils import get_model_type

from vlm_server.errors import ModelLoadError
from vlm_server.runner.model import idefics2, molmo, paligemma
from vlm_server.runner.model.deepstack import Deepstack
from vlm_server.runner.model.embedding import (
    Embedding,
    YesOrNo,
    by_classifier,
    by_last_token,
    by_mean,
    by_model,
    by_projection,
    joined_template,
    page_template,
)
from vlm_server.runner.model.fixes import (
    Fix,
    correct_idefics2,
    correct_llama4,
    correct_molmo,
    correct_paligemma,
    count_positions_of_rows,
    drop_tokenizer_options,
    embed_apart,
    embed_as_trained,
    group_masks,
    head_of_embeddings,
    look_up_both_tables,
    look_up_image_token,
    name_deepstack_layers,
    name_image_context,
    pack_tiles,
    read_settings,
    scale_all_embeddings,
    use_images_alone,
    use_static_rope,
)
from vlm_server.runner.vision.tiles import LayeredTiling, PackedTiling, Tiling, UnequalTiling
from vlm_server.runner.vision.towers import DeepstackTower, FrameTower, GlmTower, WindowTower


class MRopeRule(enum.Enum):
    """The rule by which a family's M-RoPE positions are computed."""

    WHOLE_VIDEOS = "one grid for each image and video"
    SPLIT_VIDEOS = "one grid for each image and each frame group of a video"
    IN_ORDER = "those of text, for images too"
    ASK_MODEL = "by `get_rope_index` of its language model"


POSITION_STATE = ("_position_ids", "_rope_deltas")
"""Attributes of a language model in which mlx-vlm's families with M-RoPE keep positions."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """The spelling of a checkpoint that mlx-vlm expects, where transformers writes another."""

    has_flat_config: bool = False
    """Whether mlx-vlm looks for the language model's configuration outside `text_config`."""
    vision_type: str = ""
    """The only `model_type` that the vision model may have; empty for any."""
    weight_prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of weights' names, each with mlx-vlm's: see `weights_renamed`."""


_UNCHECKED = (
    "is not one of the families that are checked (docs/families.md): its answers may be wrong "
    "where prompts are chunked or requests batched"
)
_PREFIXES_SINCE_4_52 = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.visual.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
"""Names that begin otherwise stay as they are."""
_SINCE_4_52 = Spelling(weight_prefixes=_PREFIXES_SINCE_4_52)


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of one family."""

    name: str
    """Its `model_type`."""
    is_checked: bool = True
    """Whether its tiny checkpoint passes tests/integration/test_families.py."""
    is_shardable: bool = False
    """Whether several processes answer as one does (tests/integration/test_sharding.py); needed
    only where mlx-vlm does not shard the family itself."""
    reads_images: bool = True
    """False for a family that reads text alone."""
    takes_videos: bool = False
    """Whether its processor takes videos without torch, and each frame group attends to itself
    alone. Other families get a video's frames as images."""
    mrope: MRopeRule | None = None
    """None for a family with one position a token."""
    tower: type[FrameTower] | None = None
    """Our vision tower in place of mlx-vlm's; None to encode by its `get_input_embeddings`."""
    tiling: Tiling | None = None
    """The cut of images into tiles that are encoded independently; None without one."""
    fix: Fix | None = None
    """The correction of mlx-vlm's model or processor (`fixes`)."""
    position_state: tuple[str, ...] = ()
    """Attributes in which the language model keeps a prompt's positions between calls. Ours belong
    to the request, so these are cleared."""
    chat_template: str = ""
    """Our template, where checkpoints have none, or one without images; in the form in which the
    family was trained."""
    writes_prompts: bool = False
    """Whether its processor writes prompts itself and uses no chat template."""
    grounding_tokens: int = 0
    """Minimum tokens of a screenshot for the model to point at things in it (for Qwen's, see
    https://github.com/ggml-org/llama.cpp/issues/16842); 0 if unknown."""
    coordinates: Literal["", "pixels", "thousandths"] = ""
    """Unit of points in answers: pixels of the resized image, or thousandths of its width and
    height; empty if unknown (docs/agents.md)."""
    spelling: Spelling = Spelling()
    image_text: str = ""
    """Text of an image in prompts, where mlx-vlm's id of it is negative: see `StandIn`."""
    placeholder: str = ""
    """Text of an image in prompts, where it is not one of the processor's tokens."""
    image_mark: str = ""
    """A mark around images, of which one stands between two."""
    image_token: str = ""
    """The token of an image's features, where no configuration has its id."""
    frame_tokens: tuple[str, ...] = ()
    """Tokens around an image's by which the model counts images, or their features' places."""
    part: str = ""
    """The part of mlx-vlm's model that sees and writes, configured by `PART_config`; empty for
    all of it."""
    text_types: tuple[str, ...] = ()
    """The `model_type`s that its language model may have; empty for any."""
    other_texts: tuple[str, ...] = ()
    """Those of them that mlx-vlm has as models of their own, but not in this family."""
    deepstack: Deepstack = Deepstack.BY_LAYER
    needs_even_rows: bool = False
    """Whether mlx-vlm's attention requires that all rows of a batch end at the same column."""
    stacks_images: bool = False
    """Whether `get_input_embeddings` encodes images of one size, stacked along the first axis, with
    the result for each alone."""
    aliases: tuple[str, ...] = ()
    """Other names of this `model_type`."""
    embeds: Embedding | None = None
    """The way it makes vectors, or scores of pairs; None for a family that writes."""
    module: str = ""
    """mlx-vlm's module, if it has not the family's name."""
    judges: YesOrNo | None = None
    """The question by which a family that writes can score documents; None if unknown."""

    @property
    def takes_several(self) -> bool:
        """Whether media of one size can be encoded in one call."""
        return self.tower is not None or self.stacks_images

    @property
    def warnings(self) -> tuple[str, ...]:
        return () if self.is_checked else (f"{self.name} {_UNCHECKED}",)

    def forget_positions(self, language_model: Any) -> None:
        """Clear the positions that `language_model` keeps of a prompt."""
        for name in self.position_state:
            setattr(language_model, name, None)


def _qwen(name: str, mrope: MRopeRule, tower: type[FrameTower]) -> Family:
    return Family(
        name,
        takes_videos=True,
        mrope=mrope,
        tower=tower,
        position_state=POSITION_STATE,
        grounding_tokens=1024,
        coordinates="pixels" if name == "qwen2_5_vl" else "thousandths",
        spelling=Spelling(vision_type=name),
    )


def _qwen2(name: str, tower: type[FrameTower]) -> Family:
    row = _qwen(name, MRopeRule.WHOLE_VIDEOS, tower)
    return replace(row, is_shardable=True, spelling=Spelling(True, name, _PREFIXES_SINCE_4_52))


def _glm(name: str) -> Family:
    return Family(name, mrope=MRopeRule.WHOLE_VIDEOS, tower=GlmTower, position_state=POSITION_STATE)


_ROWS = (
    Family("aya_vision", is_shardable=True, tiling=Tiling(axis=0)),
    Family("dots_ocr", is_shardable=True, fix=look_up_image_token),
    Family("fastvlm", image_text="<image>\n", aliases=("llava_qwen2",)),
    Family("gemma3", is_shardable=True, spelling=_SINCE_4_52, stacks_images=True),
    Family("gemma3n", fix=embed_as_trained, stacks_images=True),
    Family("gemma4", stacks_images=True),
    Family("gemma4_unified", fix=read_settings, stacks_images=True),
    _glm("glm4v"),
    _glm("glm4v_moe"),
    replace(_glm("glm_ocr"), tower=None),
    Family(
        "granite4_vision",
        tiling=LayeredTiling(axis=1),
        deepstack=Deepstack.BY_PLACE,
        fix=name_deepstack_layers,
    ),
    Family("idefics2", fix=correct_idefics2, image_mark=idefics2.MARK),
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
        fix=name_image_context,
    ),
    Family("kimi_k25", fix=read_settings),
    Family("kimi_vl", fix=read_settings),
    Family("lfm2_vl", tiling=UnequalTiling(axis=0), aliases=("lfm2-vl",)),
    Family("llama4", fix=correct_llama4),
    Family(
        "llava",
        is_shardable=True,
        fix=drop_tokenizer_options,
        spelling=_SINCE_4_52,
        stacks_images=True,
    ),
    Family(
        "llava_next",
        fix=pack_tiles,
        tiling=PackedTiling(axis=1),
        spelling=Spelling(
            weight_prefixes=_PREFIXES_SINCE_4_52 | {"model.image_newline": "image_newline"}
        ),
    ),
    Family("llava_onevision", is_shardable=True, tiling=PackedTiling(axis=1)),
    Family(
        "minicpmo",
        mrope=MRopeRule.IN_ORDER,
        fix=use_images_alone,
        position_state=POSITION_STATE,
        placeholder="<image>./</image>",
        image_token="<unk>",  # noqa: S106 - of an image
        frame_tokens=("<image>", "</image>"),
    ),
    Family("mistral3", is_shardable=True),
    Family(
        "paddleocr_vl",
        is_shardable=True,
        mrope=MRopeRule.WHOLE_VIDEOS,
        position_state=POSITION_STATE,
        spelling=Spelling(has_flat_config=True, vision_type="paddleocr_vl"),
    ),
    Family(
        "molmo",
        fix=correct_molmo,
        chat_template=molmo.TEMPLATE,
        image_token=molmo.IMAGE,
        frame_tokens=("<im_start>", "<im_end>"),
    ),
    Family(
        "molmo2",
        fix=look_up_both_tables,
        image_token=molmo.IMAGE,
        frame_tokens=("<im_start>", "<low_res_im_start>", "<im_end>"),
    ),
    Family("paligemma", fix=correct_paligemma, chat_template=paligemma.TEMPLATE),
    Family("pixtral", is_shardable=True, spelling=_SINCE_4_52),
    _qwen2("qwen2_vl", FrameTower),
    _qwen2("qwen2_5_vl", WindowTower),
    replace(
        _qwen("qwen3_vl", MRopeRule.SPLIT_VIDEOS, DeepstackTower),
        is_shardable=True,
        judges=YesOrNo(
            "Given a search query, retrieve relevant candidates that answer the query.",
            before_query="<Query>:",
            before_document="\n<Document>:",
        ),
    ),
    replace(_qwen("qwen3_vl_moe", MRopeRule.SPLIT_VIDEOS, DeepstackTower), needs_even_rows=True),
    _qwen("qwen3_5", MRopeRule.SPLIT_VIDEOS, DeepstackTower),
    _qwen("qwen3_5_moe", MRopeRule.SPLIT_VIDEOS, DeepstackTower),
    Family(
        "qwen3_omni_moe",
        mrope=MRopeRule.SPLIT_VIDEOS,
        tower=DeepstackTower,
        position_state=POSITION_STATE,
        part="thinker",
        needs_even_rows=True,
        deepstack=Deepstack.ALL_ROWS,
    ),
    Family("step3p7"),
    Family("smolvlm", is_shardable=True, tiling=Tiling(axis=1)),
)
_TEXTS = (
    "afmoe",
    "apertus",
    "baichuan_m1",
    "bailing_moe",
    "bailing_moe_linear",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "dbrx",
    "deepseek",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "gemma",
    "gemma3_text",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granitemoehybrid",
    "helium",
    "hunyuan",
    "hunyuan_v1_dense",
    "iquestloopcoder",
    "jamba",
    "k2_horizon",
    "kimi_linear",
    "klear",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "lille_130m",
    "llama",
    "longcat_flash",
    "longcat_flash_ngram",
    "longcat_flash_sparse",
    "mamba",
    "mamba2",
    "mellum",
    "mimo",
    "mimo_v2_flash",
    "minimax",
    "ministral3",
    "mixtral",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "nemotron_nas",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "openelm",
    "phi",
    "phi3",
    "phimoe",
    "phixtral",
    "plamo",
    "plamo2",
    "qwen",
    "qwen2",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv7",
    "seed_oss",
    "smollm3",
    "solar_open",
    "spark2_5",
    "stablelm",
    "starcoder2",
    "step3p5",
    "telechat3",
    "xing4_0",
    "youtu_llm",
)
"""Families that read text alone, and need no more than a row."""
_TEXT_ROWS = (
    *(Family(name, reads_images=False) for name in _TEXTS),
    Family("gemma2", reads_images=False, fix=group_masks),
    Family("gpt_bigcode", reads_images=False, fix=count_positions_of_rows),
    *(
        Family(name, reads_images=False, fix=scale_all_embeddings)
        for name in ("granite", "granitemoe", "minicpm", "minicpm3")
    ),
    *(Family(name, reads_images=False, fix=use_static_rope) for name in ("internlm2", "internlm3")),
    Family("llama4_text", reads_images=False, fix=head_of_embeddings),
    Family(
        "qwen3",
        reads_images=False,
        judges=YesOrNo(
            "Given a web search query, retrieve relevant passages that answer the query",
            before_query="\n<Query>: ",
            before_document="\n<Document>: ",
        ),
    ),
    *(
        Family(
            name,
            reads_images=False,
            mrope=MRopeRule.ASK_MODEL,
            position_state=POSITION_STATE,
        )
        for name in ("qwen3_5_moe_text", "qwen3_5_text")
    ),
)
_COLQWEN = page_template(
    before="<|im_start|>user\\n",
    image="<|vision_start|><|image_pad|><|vision_end|>",
    after="<|im_end|><|endoftext|>",
    spare="<|endoftext|>",
)
_COLIDEFICS = page_template(
    before="<|im_start|>User:",
    image="<image>",
    after="<end_of_utterance>\\nAssistant:",
    spare="<end_of_utterance>",
)
_TEXT_EMBEDDING = Embedding(by_model)
_EMBEDDING_ROWS = (
    replace(
        _qwen("qwen3_vl_embedding", MRopeRule.SPLIT_VIDEOS, DeepstackTower),
        coordinates="",
        grounding_tokens=0,
        spelling=Spelling(vision_type="qwen3_vl"),
        embeds=Embedding(
            by_last_token, instruction="Represent the user's input.", processor="qwen3_vl"
        ),
    ),
    Family(
        "colqwen2_5",
        tower=WindowTower,
        spelling=Spelling(True, "qwen2_5_vl"),
        embeds=Embedding(
            by_projection("custom_text_proj"),
            is_multi=True,
            template=_COLQWEN,
            processor="qwen2_5_vl",
        ),
    ),
    Family(
        "colidefics3",
        tiling=Tiling(axis=1),
        embeds=Embedding(
            by_projection("linear"), is_multi=True, template=_COLIDEFICS, processor="idefics3"
        ),
    ),
    Family(
        "embedding_gemma2",
        fix=embed_apart,
        embeds=Embedding(by_mean, template=joined_template("<|image|>")),
    ),
    *(
        Family(name, reads_images=False, embeds=_TEXT_EMBEDDING)
        for name in (
            "bert",
            "llama_bidirec",
            "modernbert",
        )
    ),
    Family(
        "xlm_roberta",
        reads_images=False,
        embeds=Embedding(by_model, processor="xlm-roberta", first_position=2),
        aliases=("xlm-roberta",),
    ),
    Family(
        "gemma3_embedding",
        reads_images=False,
        embeds=Embedding(by_model, processor="gemma3_text"),
    ),
    Family("lfm2_embedding", reads_images=False, embeds=Embedding(by_model, processor="lfm2")),
    Family(
        "lfm2_colbert",
        reads_images=False,
        embeds=Embedding(by_model, is_multi=True, processor="lfm2", batches_lengths=False),
    ),
    Family(
        "ministral3_embedding",
        reads_images=False,
        embeds=Embedding(by_model, processor="ministral3"),
    ),
    Family("qwen3_embedding", reads_images=False, embeds=Embedding(by_model, processor="qwen3")),
    *(
        Family(
            f"{name.replace('-', '_')}_reranker",
            reads_images=False,
            module=name.replace("-", "_"),
            embeds=Embedding(
                by_classifier,
                of_pairs=True,
                processor=name,
                first_position=2 if name == "xlm-roberta" else 0,
            ),
        )
        for name in ("bert", "modernbert", "xlm-roberta")
    ),
)
FAMILIES = {
    name: family
    for family in (*_ROWS, *_TEXT_ROWS, *_EMBEDDING_ROWS)
    for name in (family.name, *family.aliases)
}


def row_of(config: Mapping[str, Any]) -> Family | None:
    """The row of a configuration's `model_type`, or of the one that mlx-vlm takes it for."""
    name = config.get("model_type")
    return FAMILIES.get(str(name)) or FAMILIES.get(str(get_model_type(dict(config))))


def with_module(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the `model_type` of the module that mlx-vlm has for it."""
    row = row_of(config)
    return {**config, **({"model_type": row.module} if row and row.module else {})}


WRITE_PROMPTS = frozenset({"hrm_text", "kimi_k3", "plamo2vl"})
"""Families without a row whose processors use no chat template."""
_RUNS_CODE = frozenset({"got", "inkling", "moondream2"})
"""Families whose processors in mlx-vlm run the checkpoint's code even if told not to."""
_ENCODER_DECODERS = frozenset({"florence2"})
"""Encoder-decoders whose configuration does not say so itself."""
_BY_NUMBER = "mlx-vlm's processor names the places of images in a prompt by number"
_DROPS_LAST = "mlx-vlm's processor drops the last token of a prompt, which may be one of an image"
_WRITES_PROMPT = "mlx-vlm's processor writes the prompt itself, with one image at its beginning"
_WRONG = {
    "afm7": "mlx-vlm's layers that reuse keys count the positions of one row",
    "deepseek_vl_v2": _DROPS_LAST,
    "deepseekocr": f"{_DROPS_LAST}, and has one image a prompt",
    "deepseekocr_2": f"{_DROPS_LAST}, and has one image a prompt",
    "hy_v4": "its answers differ in batches, and with the chunks of a prompt",
    "hunyuan_vl": "mlx-vlm gives an image its positions in the first chunk of a prompt alone, and "
    "all rows of a batch the positions of the first",
    "llada2_moe": "mlx-vlm has it generate by diffusion, and not token by token",
    "llama_nemotron_vl_embedding": "mlx-vlm has no processor of its images",
    "llava_bunny": "mlx-vlm's model shows one image a prompt",
    "minicpmv4_6": _BY_NUMBER,
    "mllama": "images enter by cross-attention, and not by the prompt's embeddings",
    "moondream3": _WRITES_PROMPT,
    "phi3small": "mlx-vlm writes its logits out of bounds",
    "phi3_v": "mlx-vlm's processor drops the token after each image",
    "siglip": "mlx-vlm has its half for texts, and none for images",
    "phi4mm": "one id stands for an image in its prompts, whatever the number of its features",
    "qwen4_exp": "mlx-vlm writes outside its mask of attention for a prompt of two tokens",
}
"""Families with wrong answers or vectors, and the reasons; refused even with `allow_unchecked`."""


def refuse_unservable(config: dict[str, Any], *, allow_unchecked: bool) -> None:
    """Raises ModelLoadError for a configuration that runs code, has no causal language model, or
    is of a family that is known to be wrong, or unchecked."""
    name = config["model_type"]
    if "model_file" in config:
        raise ModelLoadError("config.json has `model_file`, code to be run from the checkpoint")
    if get_model_type(config) in _RUNS_CODE:
        raise ModelLoadError(f"mlx-vlm runs code from checkpoints of {name}")
    if config.get("is_encoder_decoder") or name in _ENCODER_DECODERS:
        raise ModelLoadError(f"{name} is an encoder-decoder model")
    if reason := _WRONG.get(str(get_model_type(config))):
        raise ModelLoadError(f"{name} is not served: {reason}")
    row = row_of(config)
    text = (config.get("text_config") or config.get("llm_config") or {}).get("model_type")
    if row and row.text_types and text and text not in row.text_types:
        raise ModelLoadError(
            f"{name} over {text} is not served: mlx-vlm has it only over "
            f"{' and '.join(row.text_types)} (docs/families.md)"
        )
    if row is not None or allow_unchecked:
        return
    raise ModelLoadError(
        f"{name} is not one of the families that are checked (docs/families.md), so its answers "
        "may be wrong: --allow-unchecked (model.allow_unchecked) serves it anyway"
    )
