"""The row of a family in the table: what is known of one `model_type`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vlm_server.runner.families.corrections import Fix
from vlm_server.runner.families.embedding import Embedding, YesOrNo
from vlm_server.runner.model.deepstack import Deepstack
from vlm_server.runner.vision.tiles import Tiling
from vlm_server.runner.vision.towers import FrameTower


class MRopeRule(enum.Enum):
    """The rule by which a family's M-RoPE positions are computed."""

    WHOLE_VIDEOS = "one grid for each image and video"
    SPLIT_VIDEOS = "one grid for each image and each frame group of a video"
    IN_ORDER = "those of text, for images too"
    ASK_MODEL = "by `get_rope_index` of its language model"


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
    """The correction of mlx-vlm's model or processor (`corrections`)."""
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
