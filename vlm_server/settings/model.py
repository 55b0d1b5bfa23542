"""Settings of the served checkpoints, and of loading them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import AUTO, AbsolutePath, Auto, Off, Word

EMBEDDED_MODEL = "demo"
"""The word for the model that is part of the program."""


class CheckpointSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint, the way to load it, and when."""

    path: Annotated[str, Word(EMBEDDED_MODEL)] = ""
    """Folder of a checkpoint, or its name on Hugging Face's hub (`org/name` or
    `org/name@revision`), which is downloaded if it is not on this machine; `demo` is the embedded
    model. A relative path starts at the folder of this file; on the command line and in the
    environment, at the working folder."""
    aliases: tuple[str, ...] = ()
    """More names that the model is asked for by: `gpt-4o`, or patterns such as `gpt-*` and
    `claude-*` (`*` is any text, `?` one character, `[ab]` one of these)."""
    pinned: bool = False
    """Whether it is loaded at the start, and never unloaded."""
    keep_alive_seconds: Annotated[Annotated[float, Meta(gt=0)] | None, Word("forever")] = 300.0
    """Time without a request after which a model that is not `pinned` is unloaded; with `forever`,
    it is unloaded only if another model needs its memory. Ollama's clients may set `keep_alive` in
    a request."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the weights; `auto` is float32 on a CPU and the checkpoint's own type
    elsewhere."""
    max_context_tokens: Annotated[Annotated[int, Meta(ge=1)] | None, Auto] = None
    """Maximum tokens of prompt plus answer; `auto` is the model's own limit."""
    task: Literal["auto", "generate", "embed"] = "auto"
    """What the model is for: to write answers, or to make vectors (docs/embeddings.md); with `auto`
    its files decide."""
    tool_parser: str = AUTO
    """How the model writes tool calls: the name of one of mlx-vlm's parsers, such as json_tools,
    qwen3_coder or mistral; with `auto` its chat template decides, or json_tools is described in the
    prompt; with `off` it calls tools only when a request forces it to."""
    chat_template: Annotated[str, Auto] = ""
    """File with a chat template (Jinja), in place of the checkpoint's, which is `auto`. A relative
    path starts where that of `model.path` does."""
    drafter: str = AUTO
    """Trained drafter, whose drafts are verified like others, so that answers stay the same
    (docs/models.md): the folder of one, or of a checkpoint that has one; with `auto` the one within
    the model's folder or beside it, if there is any; with `off` none. A relative path starts where
    that of `path` does."""
    allow_unchecked: bool = False
    """Whether to serve a model family that no test covers (docs/families.md); those known to answer
    wrongly are refused in any case."""


class ModelSettings(CheckpointSettings, frozen=True, forbid_unknown_fields=True):
    """The default model."""

    pinned: bool = True
    """Whether it is loaded at the start, and never unloaded."""
    name: Annotated[str, Auto] = ""
    """Model name in the API; `auto` is its name on the hub, or that of the folder."""
    search_folders: tuple[AbsolutePath, ...] = ()
    """Absolute paths of folders in which checkpoints are looked for by name, as `org/name` or
    `name`, besides the hub's cache and LM Studio's folder."""


class ListedModel(CheckpointSettings, frozen=True, forbid_unknown_fields=True):
    """A further model, named by its table; or a LoRA adapter of one."""

    path: str = ""
    """Folder of a checkpoint, or its name on Hugging Face's hub; see `model.path`."""

    base: Annotated[str, Off] = ""
    """Name of the model to which this table adds a LoRA adapter, whose engine answers for both;
    `off` for a model of its own. Besides it, such a table has `adapter`, and perhaps `aliases`."""
    adapter: Annotated[str, Off] = ""
    """Folder of the LoRA adapter, as mlx-vlm or PEFT saves it. A relative path starts where that of
    `path` does."""

    def as_model(self, name: str, search_folders: tuple[str, ...]) -> ModelSettings:
        """The settings for loading this model."""
        own_fields = {field: getattr(self, field) for field in CheckpointSettings.__struct_fields__}
        return ModelSettings(**own_fields, name=name, search_folders=search_folders)
