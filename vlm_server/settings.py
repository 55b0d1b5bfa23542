"""All settings, in one typed tree, and how they are read.

A setting is one field with its name, type, bounds, default and description. Settings are read
from a TOML file (`configs/default.toml` lists all of them) and from `section.key=value`
overrides. Unknown names are errors.
"""

from __future__ import annotations

import ipaddress
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vlm_server.errors import ConfigError

MIB = 1 << 20


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[
        str,
        Meta(description="Address to listen on; any but loopback requires an API key."),
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="TCP port; 0 picks a free one and prints it.")
    ] = 8000
    api_keys: Annotated[
        tuple[str, ...],
        Meta(
            description="Accepted API keys (`Authorization: Bearer`); empty means no key is needed."
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Accepted Host headers; empty means loopback names and `server.host` "
            "(this stops DNS rebinding)."
        ),
    ] = ()
    drain_seconds: Annotated[
        float, Meta(ge=0, description="Time for running requests to finish on shutdown.")
    ] = 20.0


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[
        str, Meta(description="Folder of a checkpoint; empty means the embedded model.")
    ] = ""
    name: Annotated[
        str, Meta(description="Model name in the API; empty means the name of the folder.")
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


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="Maximum size of a request's body.")
    ] = 64 * MIB
    max_messages: Annotated[int, Meta(ge=1, description="Maximum messages in a request.")] = 2048
    max_parts: Annotated[
        int, Meta(ge=1, description="Maximum content parts in a request, over all its messages.")
    ] = 512
    max_images: Annotated[int, Meta(ge=0, description="Maximum images in a request.")] = 64
    max_image_bytes: Annotated[
        int, Meta(ge=1, description="Maximum size of an encoded image, after base64 decoding.")
    ] = 20 * MIB
    max_image_pixels: Annotated[
        int, Meta(ge=1, description="Maximum pixels of an image, as declared in its header.")
    ] = 50_000_000
    max_videos: Annotated[int, Meta(ge=0, description="Maximum videos in a request.")] = 4
    max_video_bytes: Annotated[
        int, Meta(ge=1, description="Maximum size of an encoded video, after base64 decoding.")
    ] = 40 * MIB
    max_text_bytes: Annotated[
        int, Meta(ge=1, description="Maximum text in a request, over all its messages.")
    ] = 4 * MIB
    max_schema_bytes: Annotated[
        int, Meta(ge=1, description="Maximum size of the JSON schema of a `response_format`.")
    ] = 64 << 10
    max_stop_strings: Annotated[int, Meta(ge=0, description="Maximum `stop` strings.")] = 16
    max_requests: Annotated[
        int, Meta(ge=1, description="Maximum requests in flight; more are answered 429.")
    ] = 64
    body_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Time within which a request's body must arrive.")
    ] = 60.0


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
    max_num_seqs: Annotated[int, Meta(ge=1, description="Maximum sequences decoded together.")] = 16
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
            "encoder or preparers do not get on, is restarted; must be longer than any step.",
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
            description="Time limit for compiling the JSON schema of a request; the request is "
            "refused if it takes longer.",
        ),
    ] = 5.0


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum device memory; 0 is automatic: what the system recommends on "
            "Metal, 90% of a CUDA device's memory, half of the machine's on a CPU.",
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


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Minimum severity of logged messages."),
    ] = "info"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of the daemon; immutable."""

    server: Server = Server()
    model: Model = Model()
    limits: Limits = Limits()
    video: Video = Video()
    scheduler: Scheduler = Scheduler()
    cache: Cache = Cache()
    engine: Engine = Engine()
    memory: Memory = Memory()
    log: Log = Log()


def load(path: Path | None = None, overrides: tuple[str, ...] = ()) -> Settings:
    """Settings from the defaults, then the TOML file at `path`, then `section.key=value` lines.

    Raises ConfigError, naming the setting, if one is unknown, of the wrong type or out of
    bounds, if the address is not loopback and there is no API key, or if `cache.disk_path` is
    relative.
    """
    table: dict[str, Any] = _read_toml(path) if path else {}
    for override in overrides:
        _apply_override(table, override)
    try:
        settings = msgspec.convert(table, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("`$.", "`")) from None
    _check_exposure(settings.server)
    _check_disk(settings.cache)
    return settings


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _apply_override(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"expected section.key=value, not {override!r}")
    inner = table.setdefault(section, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{section!r} is not a section")
    try:
        inner[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        inner[key] = text.strip()  # a bare word or path counts as a string


def _check_disk(cache: Cache) -> None:
    if cache.disk_path and not Path(cache.disk_path).expanduser().is_absolute():
        raise ConfigError(f"cache.disk_path {cache.disk_path!r} is not absolute")


def _check_exposure(server: Server) -> None:
    if not is_loopback(server.host) and not any(server.api_keys):
        raise ConfigError(
            f"server.host {server.host!r} can be reached from other machines: "
            "set server.api_keys, or listen on 127.0.0.1"
        )
    if any(len(key) < 8 for key in server.api_keys):
        raise ConfigError("server.api_keys: a key needs at least 8 characters")
