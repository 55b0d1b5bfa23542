"""Settings of the served checkpoints, and of loading them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint, and the way to load it."""

    path: Annotated[
        str,
        Meta(
            description="Folder of a checkpoint, or its name on Hugging Face's hub (`org/name` "
            "or `org/name@revision`), which is downloaded if it is not on this machine; empty "
            "means the embedded model. A relative path starts at the folder of this file; on the "
            "command line, at the working folder."
        ),
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(
            description="Data type of the weights; auto is float32 on a CPU and the "
            "checkpoint's own type elsewhere."
        ),
    ] = "auto"
    max_context_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum tokens of prompt plus answer; 0 means the model's own limit.",
        ),
    ] = 0
    tool_parser: Annotated[
        str,
        Meta(
            description="How the model writes tool calls: the name of one of mlx-vlm's parsers, "
            "such as json_tools, qwen3_coder or mistral; with auto its chat template decides, with "
            "none it calls tools only when a request forces it to."
        ),
    ] = "auto"
    chat_template: Annotated[
        str,
        Meta(
            description="File with a chat template (Jinja), in place of the checkpoint's; empty "
            "means the checkpoint's. A relative path starts where that of `model.path` does."
        ),
    ] = ""
    allow_unchecked: Annotated[
        bool,
        Meta(
            description="Whether to serve a model family that no test covers (docs/families.md); "
            "those known to answer wrongly are refused in any case."
        ),
    ] = False


class ModelSettings(Checkpoint, frozen=True, forbid_unknown_fields=True):
    """The model that is loaded at the start, and stays loaded."""

    name: Annotated[
        str,
        Meta(
            description="Model name in the API; empty means its name on the hub, or that of the "
            "folder."
        ),
    ] = ""
    search_paths: Annotated[
        tuple[str, ...],
        Meta(
            description="Absolute paths of folders in which checkpoints are looked for by name, "
            "as `org/name` or `name`, besides the hub's cache and LM Studio's folder."
        ),
    ] = ()


class ListedModel(Checkpoint, frozen=True, forbid_unknown_fields=True):
    """A further model, loaded on demand and named by its table."""

    aliases: Annotated[
        tuple[str, ...],
        Meta(description="More names that it is asked for by; see `server.model_aliases`."),
    ] = ()
    pinned: Annotated[
        bool,
        Meta(description="Whether it is loaded at the start, and never unloaded."),
    ] = False
    keep_alive_seconds: Annotated[
        float,
        Meta(
            ge=-1,
            description="Time without a request after which it is unloaded; -1 is never, unless "
            "another model needs its memory. Ollama's clients may set `keep_alive` in a request.",
        ),
    ] = 300.0

    def as_model(self, name: str, search_paths: tuple[str, ...]) -> ModelSettings:
        """The settings for loading this model."""
        own = {field: getattr(self, field) for field in Checkpoint.__struct_fields__}
        return ModelSettings(**own, name=name, search_paths=search_paths)
