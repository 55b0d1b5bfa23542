"""Settings of the served checkpoints, and of loading them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import AbsolutePath

AUTO, OFF = "auto", "off"
"""Values of `drafter` that are no folders."""


class CheckpointSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint, and the way to load it."""

    path: str = ""
    """Folder of a checkpoint, or its name on Hugging Face's hub (`org/name` or
    `org/name@revision`), which is downloaded if it is not on this machine; empty means the embedded
    model. A relative path starts at the folder of this file; on the command line, at the working
    folder."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the weights; auto is float32 on a CPU and the checkpoint's own type
    elsewhere."""
    max_context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Maximum tokens of prompt plus answer; 0 means the model's own limit."""
    task: Literal["auto", "generate", "embed"] = "auto"
    """What the model is for: to write answers, or to make vectors (docs/embeddings.md); with auto
    its files decide."""
    tool_parser: str = "auto"
    """How the model writes tool calls: the name of one of mlx-vlm's parsers, such as json_tools,
    qwen3_coder or mistral; with auto its chat template decides, or json_tools is described in the
    prompt; with none it calls tools only when a request forces it to."""
    chat_template: str = ""
    """File with a chat template (Jinja), in place of the checkpoint's; empty means the
    checkpoint's. A relative path starts where that of `model.path` does."""
    drafter: str = AUTO
    """Trained drafter, whose drafts are verified like others, so that answers stay the same
    (docs/models.md): the folder of one, or of a checkpoint that has one; with auto the one within
    the model's folder or beside it, if there is any; with off none. A relative path starts where
    that of `path` does."""
    allow_unchecked: bool = False
    """Whether to serve a model family that no test covers (docs/families.md); those known to answer
    wrongly are refused in any case."""


class ModelSettings(CheckpointSettings, frozen=True, forbid_unknown_fields=True):
    """The model that is loaded at the start, and stays loaded."""

    name: str = ""
    """Model name in the API; empty means its name on the hub, or that of the folder."""
    search_paths: tuple[AbsolutePath, ...] = ()
    """Absolute paths of folders in which checkpoints are looked for by name, as `org/name` or
    `name`, besides the hub's cache and LM Studio's folder."""


class ListedModel(CheckpointSettings, frozen=True, forbid_unknown_fields=True):
    """A further model, loaded on demand and named by its table; or a LoRA adapter of one."""

    base: str = ""
    """Name of the model to which this table adds a LoRA adapter, whose engine answers for both;
    empty for a model of its own. Besides it, such a table has `adapter`, and perhaps `aliases`."""
    adapter: str = ""
    """Folder of the LoRA adapter, as mlx-vlm or PEFT saves it. A relative path starts where that of
    `path` does."""
    aliases: tuple[str, ...] = ()
    """More names that it is asked for by; see `server.model_aliases`."""
    pinned: bool = False
    """Whether it is loaded at the start, and never unloaded."""
    keep_alive_seconds: Annotated[float, Meta(ge=-1)] = 300.0
    """Time without a request after which it is unloaded; -1 is never, unless another model needs
    its memory. Ollama's clients may set `keep_alive` in a request."""

    def as_model(self, name: str, search_paths: tuple[str, ...]) -> ModelSettings:
        """The settings for loading this model."""
        own_fields = {field: getattr(self, field) for field in CheckpointSettings.__struct_fields__}
        return ModelSettings(**own_fields, name=name, search_paths=search_paths)
