"""All settings, in one typed tree, and how they are read.

A setting is one field with its name, type, bounds, default and description. Settings are read
from a TOML file (`configs/default.toml` lists all of them) and from `section.key=value`
overrides. Unknown names are errors.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vlm_server.errors import ConfigError, NotAvailable

MIB = 1 << 20
MIN_KEY_CHARS = 8
MAX_FLOAT = 1e9
MAX_INT = 1 << 53
"""Of any setting: far above what makes sense, and below what overflows."""

_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)


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
            description="Your own API keys (`Authorization: Bearer`), which may do everything; no "
            "key is needed if there is none here and no `server.api_key_file`."
        ),
    ] = ()
    api_key_file: Annotated[
        str,
        Meta(
            description="Absolute path of a file with more API keys, with names and limits; "
            "readable by you alone, and read anew when it changes: see docs/api.md."
        ),
    ] = ""
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
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum open connections; past it, those without a whole request give way "
            "to new ones. Fewer if the limit on open files is low.",
        ),
    ] = 1024
    header_timeout_seconds: Annotated[
        float,
        Meta(gt=0, description="Time within which the headers of a request must arrive."),
    ] = 15.0
    idle_timeout_seconds: Annotated[
        float,
        Meta(gt=0, description="Time for which a connection is kept open for another request."),
    ] = 75.0
    stream_keepalive_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Silence in a stream after which a comment is sent, so that clients and "
            "proxies do not give up during a long prefill.",
        ),
    ] = 5.0

    @property
    def needs_key(self) -> bool:
        """Whether a request needs an API key."""
        return bool(self.api_keys or self.api_key_file)


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[
        str,
        Meta(
            description="Folder of a checkpoint; empty means the embedded model. A relative path "
            "starts at the folder of this file; on the command line, at the working folder."
        ),
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
    max_waiting_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum bodies, together, of requests that the device has not begun with; "
            "more are answered 429. At least `max_body_bytes` is allowed; 0 is automatic: 1/16 of "
            "the machine's memory, at least four bodies.",
        ),
    ] = 0
    body_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Time within which a request's body must arrive.")
    ] = 60.0
    max_arriving_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Maximum bytes of bodies that are still arriving, over all requests; past "
            "it the one that has cost most, in bytes times seconds, is refused.",
        ),
    ] = 256 * MIB
    max_unread_bytes: Annotated[
        int,
        Meta(ge=1024, description="Maximum bytes of an answer that a client leaves unread."),
    ] = 8 * MIB
    unread_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="A client that reads less than 64 KiB of what waits for it in this time is "
            "disconnected.",
        ),
    ] = 30.0
    intake_processes: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum processes that read bodies with media, and large ones. One is "
            "kept for bodies under 16 MiB, if there are several.",
        ),
    ] = 2
    intake_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Time limit for reading one body: its JSON, and its media's base64 and "
            "headers.",
        ),
    ] = 10.0


class Urls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    https_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts that `https:` images and videos may come from: `example.org`, "
            "`*.example.org`, or `*` for every host with a public address; empty means none."
        ),
    ] = ()
    file_roots: Annotated[
        tuple[str, ...],
        Meta(
            description="Absolute paths of folders that `file:` images and videos may come from; "
            "every client may see what is in them; empty means none."
        ),
    ] = ()
    timeout_seconds: Annotated[
        float,
        Meta(
            gt=0, description="Time limit for reading all `https:` and `file:` URLs of a request."
        ),
    ] = 10.0


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_request_pixels: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum pixels to decode for a request, over all its images; what is "
            "cached does not count.",
        ),
    ] = 1_000_000_000
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


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue_seconds: Annotated[
        float,
        Meta(ge=0, description="Time until the device begins with a request; 0 is no limit."),
    ] = 600.0
    first_token_seconds: Annotated[
        float,
        Meta(ge=0, description="Time until the first token of a request's answer; 0 is no limit."),
    ] = 1200.0
    token_seconds: Annotated[
        float,
        Meta(ge=0, description="Time between two tokens of an answer; 0 is no limit."),
    ] = 300.0
    total_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Time from a request's arrival to the end of its answer; 0 is no limit.",
        ),
    ] = 3600.0


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
    urls: Urls = Urls()
    image: Image = Image()
    deadlines: Deadlines = Deadlines()
    video: Video = Video()
    scheduler: Scheduler = Scheduler()
    cache: Cache = Cache()
    engine: Engine = Engine()
    memory: Memory = Memory()
    log: Log = Log()


def load(path: Path | None = None, overrides: tuple[str, ...] = ()) -> Settings:
    """Settings from the defaults, then the TOML file at `path`, then `section.key=value` lines.

    Raises ConfigError, naming the setting, if one is unknown, of the wrong type or out of
    bounds, if the address is not loopback and there is no API key, or if a path that has to be
    absolute is relative; NotAvailable if there is no such file. `model.path` in a file starts at
    its folder.
    """
    table: dict[str, Any] = _read_toml(path) if path else {}
    for override in overrides:
        _apply_override(table, override)
    try:
        settings = msgspec.convert(table, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("`$.", "`")) from None
    _check_numbers(settings)
    _check_exposure(settings.server)
    _check_keys(settings.server)
    _check_urls(settings.urls)
    _check_absolute("cache.disk_path", settings.cache.disk_path)
    return settings


def fault_of_key(key: str) -> str | None:
    """Why `key` can't be an API key, as the end of a sentence about it; None if it can."""
    if not key.isprintable() or any(character.isspace() for character in key):
        return "has a blank or a control character"
    if len(key) < MIN_KEY_CHARS:
        return f"has fewer than {MIN_KEY_CHARS} characters"
    return None


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
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        is_gone = isinstance(error, FileNotFoundError)
        kind = NotAvailable if is_gone else ConfigError
        raise kind(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    _resolve_model_path(table, path.absolute().parent)
    return table


def _resolve_model_path(table: dict[str, Any], folder: Path) -> None:
    model = table.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str) and model["path"]:
        model["path"] = str(folder / Path(model["path"]).expanduser())


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
    except (ValueError, RecursionError):
        inner[key] = text.strip()  # a bare word or path counts as a string


def _check_numbers(settings: Settings) -> None:
    """No number may be NaN or infinite, nor so large that clocks or messages can't hold it."""
    for section in msgspec.structs.fields(settings):
        for name, value in msgspec.structs.asdict(getattr(settings, section.name)).items():
            limit = MAX_FLOAT if isinstance(value, float) else MAX_INT
            if isinstance(value, int | float) and not value <= limit:
                raise ConfigError(f"`{section.name}.{name}` must be a number of at most {limit:g}")


def _check_absolute(name: str, path: str) -> None:
    if path and not Path(path).expanduser().is_absolute():
        raise ConfigError(f"{name} {path!r} is not absolute")


def _check_urls(urls: Urls) -> None:
    for host in urls.https_hosts:
        if not _HOST_PATTERN.fullmatch(host):
            raise ConfigError(
                f"urls.https_hosts: {host!r} is not a host, `*` or `*.` and a host's last part"
            )
    for root in urls.file_roots:
        if not root:
            raise ConfigError("urls.file_roots: a path is empty")
        _check_absolute("urls.file_roots", root)


def _check_exposure(server: Server) -> None:
    if not is_loopback(server.host) and not server.needs_key:
        raise ConfigError(
            f"server.host {server.host!r} can be reached from other machines: "
            "set server.api_key_file or server.api_keys, or listen on 127.0.0.1"
        )


def _check_keys(server: Server) -> None:
    """The messages do not show the keys."""
    for i, key in enumerate(server.api_keys):
        if fault := fault_of_key(key):
            raise ConfigError(f"server.api_keys[{i}] {fault}")
    _check_absolute("server.api_key_file", server.api_key_file)
