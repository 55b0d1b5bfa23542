"""Settings of the engine process: the model, media, scheduling, caches and memory."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vlm_server.settings.bounds import MIB


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is loaded, and how."""

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
            "such as json_tools, qwen3_coder or mistral; auto means what its chat template says, "
            "none that it calls tools only when it is made to."
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


class Model(Checkpoint, frozen=True, forbid_unknown_fields=True):
    """The model that is loaded at the start, and stays."""

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
            "as `org/name` or `name`, beside the hub's cache and LM Studio's folder."
        ),
    ] = ()


class ListedModel(Checkpoint, frozen=True, forbid_unknown_fields=True):
    """One more, which is loaded when it is first asked for; its table's name is its name."""

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
            "another model needs its memory. Ollama's clients say `keep_alive` themselves.",
        ),
    ] = 300.0


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_request_pixels: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum pixels to decode for a request, over all its images; what is "
            "cached does not count.",
        ),
    ] = 1_000_000_000
    max_pixels: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum pixels of an image as the model is shown it; larger ones are "
            "scaled down. 0 is the checkpoint's own maximum, which holds in any case.",
        ),
    ] = 0
    min_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="Minimum tokens of an image for models that scale them (the Qwen "
            "families); smaller images are scaled up. 0 is the checkpoint's own; 1024 lets them "
            "point at things in small screenshots.",
        ),
    ] = 0
    decode_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Time limit for decoding the images of a request; if they have less than "
            "100 megapixels, their share of it, but at least a twentieth.",
        ),
    ] = 120.0
    decode_memory_bytes: Annotated[
        int,
        Meta(
            ge=512 * MIB,
            description="Address space limit of a process that decodes images (Linux only); one "
            "of `limits.max_image_pixels` needs up to 24 bytes a pixel.",
        ),
    ] = 2048 * MIB


class Video(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fps: Annotated[float, Meta(gt=0, le=60, description="Frames sampled per second of video.")] = (
        2.0
    )
    max_frames: Annotated[
        int,
        Meta(
            ge=2,
            le=1024,
            description="Maximum frames per video; longer videos are sampled at a lower rate.",
        ),
    ] = 64
    max_side_pixels: Annotated[
        int, Meta(ge=64, description="Frames are scaled down to at most this on both sides.")
    ] = 512
    max_pixels: Annotated[int, Meta(ge=1, description="Maximum pixels of a frame as stored.")] = (
        9_000_000
    )
    max_seconds: Annotated[float, Meta(gt=0, description="Maximum duration of a video.")] = 600.0
    decode_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Time limit for decoding one video.")
    ] = 30.0
    decode_memory_bytes: Annotated[
        int,
        Meta(
            ge=512 * MIB,
            description="Address space limit of the process that decodes a video (Linux only).",
        ),
    ] = 2048 * MIB


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_num_seqs: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum sequences decoded together; 0 is automatic: 16 to 256, as many of "
            "4,096 tokens as half of the device memory left after the weights holds. Memory limits "
            "them in any case.",
        ),
    ] = 0
    prefill_chunk_tokens: Annotated[
        int, Meta(ge=1, description="Maximum prompt tokens prefilled in one step.")
    ] = 2048
    max_step_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Time that prefill may add to a step while other requests decode; chunks "
            "are sized to fit it, from measured speed.",
        ),
    ] = 0.1
    num_speculative_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=15,
            description="Maximum draft tokens verified per sequence and step, where measured "
            "times and hit rates promise a gain; 0 drafts none. Answers stay the same.",
        ),
    ] = 15
    max_images_per_encode: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum images of one size, or frame groups of a video, encoded in one "
            "call, where that was measured to be faster; 1: none is encoded with another.",
        ),
    ] = 8
    preparer_threads: Annotated[
        int,
        Meta(
            ge=1,
            description="Threads that prepare requests with images or videos; as many more prepare "
            "text-only ones.",
        ),
    ] = 2


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_layout_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum host memory for token layouts of images, about 2 kB each; capped "
            "at `pixel_bytes`.",
        ),
    ] = 16 << 20
    pixel_bytes: Annotated[
        int,
        Meta(
            ge=-1,
            description="Maximum host memory for decoded images; 0 caches none, -1 is automatic: "
            "1/32 of the machine's memory.",
        ),
    ] = -1
    encoder_bytes: Annotated[
        int,
        Meta(
            ge=-1,
            description="Maximum device memory for encoder outputs; 0 caches none, -1 is "
            "automatic: 1/16 of what is left after the weights.",
        ),
    ] = -1
    prefix_bytes: Annotated[
        int,
        Meta(
            ge=-1,
            description="Maximum device memory for the KV of prompts and answers; 0 caches none, "
            "-1 is automatic: 1/4 of what is left after the weights.",
        ),
    ] = -1
    grammar_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum host memory for compiled JSON schemas, 3 MB each or more; 0 keeps "
            "none.",
        ),
    ] = 128 * MIB
    disk_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum disk space for encoder outputs and KV that survive a restart; 0 "
            "stores none. The files reveal what was asked: see docs/caches.md.",
        ),
    ] = 0
    disk_path: Annotated[
        str,
        Meta(
            description="Absolute path of their folder, used by one daemon only; empty means "
            "`vlm-server` in your cache folder (~/.cache, ~/Library/Caches)."
        ),
    ] = ""
    separate_api_keys: Annotated[
        bool,
        Meta(
            description="Whether requests with different API keys share no cache entries, so that "
            "no client can find out by timing what another one asked."
        ),
    ] = True


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Time limit for loading and warm-up.")
    ] = 900.0
    silence_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="An engine with requests that sends nothing for this long, or whose "
            "encoder or preparers do not get on, is restarted; must be longer than any step, and "
            "than the encoding of an image.",
        ),
    ] = 120.0
    max_failed_steps: Annotated[
        int,
        Meta(
            ge=1,
            description="Failed steps without a token in between after which the engine is "
            "restarted, since its device can't be trusted any more.",
        ),
    ] = 3
    restart_backoff_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Pause before a restart; doubles while engines end before they are ready.",
        ),
    ] = 0.5
    restart_backoff_max_seconds: Annotated[
        float, Meta(gt=0, description="Maximum pause between restarts.")
    ] = 30.0
    quarantine_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Requests of a size that crashed two engines within this time, and then "
            "one alone, are refused until it has passed; 0 refuses none.",
        ),
    ] = 600.0
    openblas: Annotated[
        Literal["auto", "off"],
        Meta(description="Preload OpenBLAS into the engine (Linux CPU: about 50 times faster)."),
    ] = "auto"
    schema_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Time limit for compiling the JSON schema of a request, and for what may "
            "come next in its answer; the request is refused if it takes longer.",
        ),
    ] = 5.0
    schema_follow_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="CPU time for what may come next in the answers of one request with a JSON "
            "schema, beside 5 ms for each token; the request fails if it takes longer.",
        ),
    ] = 20.0
    schema_memory_bytes: Annotated[
        int,
        Meta(
            ge=64 * MIB,
            description="Memory that a JSON schema may take, and the answers of each request that "
            "follow it; each has a process of its own (Linux only).",
        ),
    ] = 256 * MIB


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum device memory; 0 is automatic: what the system recommends on "
            "Metal, 90% of a CUDA device's memory, half of the machine's on a CPU.",
        ),
    ] = 0
    model_room_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory beside its weights that a model gets at least, where several share "
            "the limit; 0 is automatic: 1/8 of its weights, at least 256 MiB. Models that do not "
            "fit side by side take turns.",
        ),
    ] = 0
    pool_limit_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum freed memory that MLX keeps for reuse; 0 is automatic: 256 MiB on "
            "a CPU, 1/8 of `memory.limit_bytes` on a GPU.",
        ),
    ] = 0
    idle_clear_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Idle time after which freed memory is returned to the system; the next "
            "request is slower, since it allocates anew.",
        ),
    ] = 30.0
    prefill_keep_alloc: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="Whether freed memory is kept between the chunks of a prompt; auto returns "
            "it when the next chunk might not fit otherwise."
        ),
    ] = "auto"
