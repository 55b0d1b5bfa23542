"""All settings, in one typed tree. Knows TOML and bounds; knows nothing of who uses them.

A setting is one field: its name, type, bounds, default and help stand together. It is read
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
        str, Meta(description="Address to listen on; another than loopback needs an API key.")
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="TCP port; 0 picks a free one and prints it.")
    ] = 8000
    api_keys: Annotated[
        tuple[str, ...],
        Meta(description="Accepted `Authorization: Bearer` keys; empty asks for none."),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names that a request may carry; empty means the loopback names "
            "and `server.host` (this stops DNS rebinding)."
        ),
    ] = ()
    drain_seconds: Annotated[
        float, Meta(ge=0, description="On shutdown, time that running requests get to finish.")
    ] = 20.0


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[
        str, Meta(description="Folder of a checkpoint; empty means the embedded model.")
    ] = ""
    name: Annotated[
        str, Meta(description="Name in the API; empty means the name of the model's folder.")
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(
            description="Type that weights are loaded as; auto is float32 on CPU and the "
            "checkpoint's own elsewhere."
        ),
    ] = "auto"
    max_context_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Longest prompt plus answer, in tokens; 0 means the model's own limit.",
        ),
    ] = 0


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="Largest request body, counted while it is read.")
    ] = 64 * MIB
    max_messages: Annotated[int, Meta(ge=1, description="Most messages in a request.")] = 2048
    max_parts: Annotated[
        int, Meta(ge=1, description="Most content parts in a request, over all its messages.")
    ] = 512
    max_images: Annotated[int, Meta(ge=0, description="Most pictures in a request.")] = 64
    max_image_bytes: Annotated[
        int, Meta(ge=1, description="Largest encoded picture, in bytes after base64.")
    ] = 20 * MIB
    max_image_pixels: Annotated[
        int, Meta(ge=1, description="Largest picture in pixels, read from its header.")
    ] = 50_000_000
    max_videos: Annotated[int, Meta(ge=0, description="Most videos in a request.")] = 4
    max_video_bytes: Annotated[
        int, Meta(ge=1, description="Largest encoded video, in bytes after base64.")
    ] = 40 * MIB
    max_text_bytes: Annotated[
        int, Meta(ge=1, description="Most text in a request, over all its messages.")
    ] = 4 * MIB
    max_schema_bytes: Annotated[
        int, Meta(ge=1, description="Largest JSON schema of a `response_format`.")
    ] = 64 << 10
    max_stop_strings: Annotated[int, Meta(ge=0, description="Most `stop` strings.")] = 16
    max_requests: Annotated[
        int, Meta(ge=1, description="Most requests in flight; one more is answered 429.")
    ] = 64
    body_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Time within which a request's body must have arrived.")
    ] = 60.0


class Video(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fps: Annotated[
        float, Meta(gt=0, le=60, description="Frames that the model is shown of each second.")
    ] = 2.0
    max_frames: Annotated[
        int,
        Meta(
            ge=2,
            le=1024,
            description="Most frames of one video; of a longer one fewer are shown a second.",
        ),
    ] = 64
    max_side_pixels: Annotated[
        int, Meta(ge=64, description="Frames are made smaller than this on both sides.")
    ] = 512
    max_pixels: Annotated[
        int, Meta(ge=1, description="Largest frame in pixels, as stored, before it is decoded.")
    ] = 9_000_000
    max_seconds: Annotated[float, Meta(gt=0, description="Longest video.")] = 600.0
    decode_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Time that decoding one video may take.")
    ] = 30.0
    decode_memory_bytes: Annotated[
        int,
        Meta(
            ge=512 * MIB,
            description="Address space of the process that decodes a video (Linux only).",
        ),
    ] = 2048 * MIB


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_num_seqs: Annotated[int, Meta(ge=1, description="Most rows decoded together.")] = 16
    prefill_chunk_tokens: Annotated[
        int, Meta(ge=1, description="Most prompt tokens prefilled in one step.")
    ] = 2048
    max_step_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Time that prefill may add to a step while answers are running; chunks "
            "shrink to it, as measured.",
        ),
    ] = 0.1
    preparer_threads: Annotated[
        int,
        Meta(
            ge=1,
            description="Threads that prepare requests with pictures; as many more take those "
            "without.",
        ),
    ] = 2


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_layout_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Most host memory for pictures' places in a prompt, some 2 kB each; never "
            "more than `pixel_bytes`.",
        ),
    ] = 16 << 20
    pixel_bytes: Annotated[
        int,
        Meta(
            ge=-1,
            description="Most host memory for decoded pictures; 0 keeps none, -1 is automatic: a "
            "32nd of the machine's.",
        ),
    ] = -1
    encoder_bytes: Annotated[
        int,
        Meta(
            ge=-1,
            description="Most device memory for encoded pictures; 0 keeps none, -1 is automatic: "
            "a 16th of what the weights leave.",
        ),
    ] = -1
    prefix_bytes: Annotated[
        int,
        Meta(
            ge=-1,
            description="Most device memory for the KV of prompts and answers; 0 keeps none, -1 "
            "is automatic: a quarter of what the weights leave.",
        ),
    ] = -1
    disk_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Most disk for encoded pictures and KV that outlive the daemon; 0 keeps "
            "none. What is kept tells what was asked: see docs/caches.md.",
        ),
    ] = 0
    disk_path: Annotated[
        str,
        Meta(
            description="Absolute path of a folder for them, of one daemon alone; empty means "
            "`vlm-server` in your folder of caches (~/.cache, ~/Library/Caches)."
        ),
    ] = ""
    separate_api_keys: Annotated[
        bool,
        Meta(
            description="Whether requests with different API keys share nothing, so that none "
            "can find out by timing what another one asked."
        ),
    ] = True


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Time that loading and warm-up may take.")
    ] = 900.0
    silence_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="An engine that has requests and says nothing for so long is replaced; "
            "longer than any single step may take.",
        ),
    ] = 120.0
    max_failed_steps: Annotated[
        int,
        Meta(
            ge=1,
            description="Steps that fail with no token between them until the engine is "
            "replaced: its device can't be trusted any more.",
        ),
    ] = 3
    restart_backoff_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Pause before a restart; it doubles while engines end before they are "
            "ready.",
        ),
    ] = 0.5
    restart_backoff_max_seconds: Annotated[
        float, Meta(gt=0, description="Longest pause between restarts.")
    ] = 30.0
    quarantine_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Requests of a size that two engines died of within this time are refused "
            "until it is over; 0 refuses none.",
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
            description="Time that compiling the JSON schema of a request may take; one that "
            "takes longer is refused.",
        ),
    ] = 5.0


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Most device memory to use; 0 is automatic: what the system recommends on "
            "Metal, nine tenths of a CUDA device's, half of the machine's on a CPU.",
        ),
    ] = 0
    pool_limit_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Most freed memory that MLX keeps for reuse; 0 is automatic: 256 MiB on a "
            "CPU, an eighth of `memory.limit_bytes` on a GPU.",
        ),
    ] = 0
    idle_clear_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Idle time after which freed memory goes back to the system; the next "
            "request takes it anew, which costs it time.",
        ),
    ] = 30.0
    prefill_keep_alloc: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="Whether freed memory is kept between the chunks of a prompt; auto gives "
            "it back when the next chunk might not find room beside it."
        ),
    ] = "auto"


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe messages that are logged."),
    ] = "info"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting of the daemon; passed down whole, never changed."""

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

    Raises ConfigError, naming the setting, for anything unknown, mistyped or out of bounds,
    for an address other than loopback without an API key, and for a relative path of the caches.
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
        inner[key] = text.strip()  # a bare word or path is a string


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
