"""Settings of the front process: connections, limits, URLs, files, batches, deadlines, log."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import MIB, AbsolutePath, Auto, Off


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """Address to listen on; any but loopback requires an API key."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """TCP port; 0 picks a free one and prints it."""
    api_keys: tuple[str, ...] = ()
    """Your own API keys (`Authorization: Bearer`), which may do everything; no key is needed if
    there is none here and no `server.api_key_file`."""
    api_key_file: Annotated[AbsolutePath, Off] = ""
    """Absolute path of a file with more API keys, with names and limits; readable by you alone, and
    read again when it changes: see docs/access.md."""
    allowed_hosts: Annotated[tuple[str, ...], Auto] = ()
    """Accepted Host headers; `auto` is loopback names and `server.host`, or any name if keys are
    needed and `server.host` is all addresses. Stops DNS rebinding."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of other origins that may use the API in a browser: `https://app.example`,
    `http://localhost:3000`, `null` (files, sandboxes), `chrome-extension://*` or another scheme of
    extensions or apps; `*` is all, only without API keys."""
    drain_timeout_seconds: Annotated[float, Meta(ge=0)] = 20.0
    """Time in which running requests may finish on shutdown."""
    max_connections: Annotated[int, Meta(ge=1)] = 1024
    """Maximum open connections; past it, a new one replaces one that has no complete request. Fewer
    if the limit on open files is low."""
    header_timeout_seconds: Annotated[float, Meta(gt=0)] = 15.0
    """Time within which the headers of a request must arrive."""
    idle_timeout_seconds: Annotated[float, Meta(gt=0)] = 75.0
    """Time for which a connection is kept open for another request."""
    stream_keepalive_seconds: Annotated[float, Meta(gt=0)] = 5.0
    """Silence in a stream after which a sign of life is sent (a comment, a `ping` or an empty line
    of Ollama's), so that clients and proxies do not give up during a long prefill."""
    stream_keepalive: Literal["comment", "empty_chunk", "off"] = "comment"
    """That sign of life: `comment`; `empty_chunk` for clients that fail at comments, an event of
    the dialect that adds nothing; or `off`. The header `X-VLM-Keepalive` chooses for a request. In
    all but `off`, Anthropic's clients get a `ping` and Ollama's an empty line."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """What happens to fields of a request that are unknown: refused by name, or ignored and named
    in the header `X-VLM-Ignored` and in the log."""
    max_responses_bytes: Annotated[int, Meta(ge=0)] = 64 * MIB
    """Maximum bytes of the turns that are kept for `/v1/responses`, with their pictures. API keys
    share it; the oldest turns of the one with the most are dropped first. 0 keeps none."""
    responses_keep_seconds: Annotated[float, Meta(gt=0)] = 3600.0
    """Time for which a turn of `/v1/responses` is kept."""
    stream_resume_keep_seconds: Annotated[float, Meta(gt=0)] = 60.0
    """Time for which a resumable stream waits for its client: its answer goes on for as long
    without a reader, and its events are kept for as long after its end."""
    max_stream_resume_bytes: Annotated[int, Meta(ge=0)] = 64 * MIB
    """Maximum bytes of events that are kept for clients that resume their streams; beyond it, the
    API key with the most loses its oldest. With 0 no stream can be resumed."""
    max_stream_resume_bytes_per_key: Annotated[int, Meta(ge=0)] = 32 * MIB
    """The same for each API key, or for all clients together if there are no keys."""

    @property
    def needs_key(self) -> bool:
        """Whether a request needs an API key."""
        return bool(self.api_keys or self.api_key_file)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 64 * MIB
    """Maximum size of a request's body."""
    max_messages: Annotated[int, Meta(ge=1)] = 2048
    """Maximum messages in a request."""
    max_parts: Annotated[int, Meta(ge=1)] = 8192
    """Maximum content parts in a request, over all its messages."""
    max_inputs: Annotated[int, Meta(ge=1)] = 2048
    """Maximum inputs in a request for vectors, and documents in one for scores."""
    max_options: Annotated[int, Meta(ge=1)] = 4096
    """Maximum options in a request for decisions, over all its questions."""
    max_images: Annotated[int, Meta(ge=0)] = 64
    """Maximum images in a request."""
    max_image_bytes: Annotated[int, Meta(ge=1)] = 20 * MIB
    """Maximum size of an encoded image, after base64 decoding."""
    max_image_pixels: Annotated[int, Meta(ge=1)] = 50_000_000
    """Maximum pixels of an image, as declared in its header."""
    max_videos: Annotated[int, Meta(ge=0)] = 4
    """Maximum videos in a request."""
    max_video_bytes: Annotated[int, Meta(ge=1)] = 40 * MIB
    """Maximum size of an encoded video, after base64 decoding."""
    max_document_bytes: Annotated[int, Meta(ge=1)] = 32 * MIB
    """Maximum size of a document's file, after base64 decoding."""
    max_pages: Annotated[int, Meta(ge=0)] = 100
    """Maximum pages of documents in a request; they do not count as `max_images`. Their pictures
    may have `max_body_bytes` in all."""
    max_text_bytes: Annotated[int, Meta(ge=1)] = 4 * MIB
    """Maximum text in a request, over all its messages."""
    max_schema_bytes: Annotated[int, Meta(ge=1)] = 64 << 10
    """Maximum size of the JSON schema of a `response_format`."""
    default_max_tokens: Annotated[Annotated[int, Meta(ge=1)] | None, Off] = 4096
    """Longest answer of a request that names no `max_tokens`; with `off` it is as long as the
    context has room for."""
    max_stop_strings: Annotated[int, Meta(ge=0)] = 16
    """Maximum `stop` strings."""
    max_requests: Annotated[int, Meta(ge=1)] = 64
    """Maximum requests in flight; more are answered 429."""
    max_waiting_bytes: Annotated[Annotated[int, Meta(ge=1)] | None, Auto] = None
    """Maximum size of all bodies of requests that the device has not begun with; beyond it,
    requests are answered 429. At least `max_body_bytes` is allowed; `auto` is 1/16 of the machine's
    memory, at least four bodies."""
    body_timeout_seconds: Annotated[float, Meta(gt=0)] = 60.0
    """Time within which a request's body must arrive."""
    max_arriving_bytes: Annotated[int, Meta(ge=1024)] = 256 * MIB
    """Maximum bytes of bodies that are still arriving, over all requests; past it the one that has
    cost most, in bytes times seconds, is refused."""
    max_unread_bytes: Annotated[int, Meta(ge=1024)] = 8 * MIB
    """Maximum bytes of an answer that a client leaves unread."""
    unread_timeout_seconds: Annotated[float, Meta(gt=0)] = 30.0
    """A client that reads less than 64 KiB of what waits for it in this time is disconnected."""
    max_parsing_processes: Annotated[int, Meta(ge=1)] = 2
    """Maximum processes that read bodies with media, and large ones. One is kept for bodies under
    16 MiB, if there are several."""
    parsing_timeout_seconds: Annotated[float, Meta(gt=0)] = 10.0
    """Time limit for reading one body: its JSON, and its media's base64 and headers."""


class Urls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    https_hosts: tuple[str, ...] = ()
    """Hosts that `https:` images and videos may come from: `example.org`, `*.example.org`, or `*`
    for every host with a public address; empty means none."""
    file_folders: tuple[AbsolutePath, ...] = ()
    """Absolute paths of folders that `file:` images and videos may come from; every client may see
    what is in them; empty means none."""
    timeout_seconds: Annotated[float, Meta(gt=0)] = 10.0
    """Time limit for reading all `https:` and `file:` URLs of a request."""


class WatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_watches: Annotated[int, Meta(ge=0)] = 64
    """Maximum watches (`/v1/watch`) at a time; 0 allows none."""
    max_watches_per_key: Annotated[int, Meta(ge=0)] = 16
    """The same for each API key, or for all clients together if there are no keys."""
    max_cameras: Annotated[int, Meta(ge=0)] = 8
    """Maximum watches of a camera's `url`, each of which takes a process."""
    max_window: Annotated[int, Meta(ge=1)] = 16
    """Maximum frames that a question is about: `window` of a watch."""
    max_bytes: Annotated[int, Meta(ge=1024)] = 256 * MIB
    """Maximum bytes of the frames that all watches keep, shared fairly by API keys; frames beyond
    it are answered 429."""
    max_frames_per_second: Annotated[float, Meta(gt=0)] = 30.0
    """Maximum frames that a watch takes in a second; more are answered 429, or dropped where they
    come in one body."""
    idle_timeout_seconds: Annotated[float, Meta(gt=0)] = 300.0
    """Time without a frame after which a watch ends."""
    max_running: Annotated[int, Meta(ge=1)] = 2
    """Maximum number of watches' questions that are answered at the same time."""
    yield_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """Time for which a watch's question lets other requests that wait for the device go first."""


class FileSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    folder: Annotated[AbsolutePath, Auto] = ""
    """Absolute path of a folder of your own in which uploaded files outlive the daemon; one daemon
    at a time uses it. `auto` is a temporary folder, which is gone when the daemon stops."""
    max_bytes: Annotated[int, Meta(ge=0)] = 1024 * MIB
    """Maximum disk space of all uploaded files, each counted as 16 KiB more than its size. API keys
    share it; the least recently used file of the one with the most is dropped first. 0 takes no
    files."""
    max_file_bytes: Annotated[int, Meta(ge=1024)] = 256 * MIB
    """Maximum size of an uploaded file, within `files.max_bytes`."""
    keep_seconds: Annotated[float, Meta(gt=0)] = 86400.0
    """Time after its last use for which an uploaded file is kept."""
    upload_timeout_seconds: Annotated[float, Meta(gt=0)] = 300.0
    """Time within which an upload must arrive."""


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_running: Annotated[int, Meta(ge=0, le=1024)] = 4
    """Maximum number of lines that are run at the same time. 0 takes no batches."""
    min_idle_seconds: Annotated[float, Meta(ge=0)] = 1.0
    """Minimum time without another request before a line is begun."""
    on_battery: bool = False
    """Whether lines are run while the machine is on battery."""
    max_batches_per_key: Annotated[int, Meta(ge=1)] = 100
    """Maximum number of batches of an API key. The oldest one that has ended makes room."""
    max_lines: Annotated[int, Meta(ge=1)] = 50_000
    """Maximum number of lines of a batch."""
    max_line_bytes: Annotated[int, Meta(ge=1024)] = 8 * MIB
    """Maximum size of a line."""
    max_output_bytes: Annotated[int, Meta(ge=1024)] = 256 * MIB
    """Maximum size of a batch's results, within `files.max_file_bytes`. A result past it is
    replaced by an error."""


class DeadlineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue_timeout_seconds: Annotated[Annotated[float, Meta(gt=0)] | None, Off] = 600.0
    """Time until the device begins with a request; `off` is no limit."""
    first_token_timeout_seconds: Annotated[Annotated[float, Meta(gt=0)] | None, Off] = 1200.0
    """Time until the first token of a request's answer; `off` is no limit."""
    token_timeout_seconds: Annotated[Annotated[float, Meta(gt=0)] | None, Off] = 300.0
    """Time between two tokens of an answer; `off` is no limit."""
    total_timeout_seconds: Annotated[Annotated[float, Meta(gt=0)] | None, Off] = 3600.0
    """Time from a request's arrival to the end of its answer; `off` is no limit."""


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of logged messages."""
    format: Literal["text", "verbose", "json"] = "text"
    """How log lines are written: as text, in which a request is one short line; as text with all
    fields of a request; or each as a JSON object."""


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefix: Annotated[str, Meta(pattern="^([a-zA-Z_:][a-zA-Z0-9_:]*)?$", max_length=64)] = (
        "vlm_server_"
    )
    """What the names of all metrics begin with; with `vllm:`, dashboards made for vLLM work as they
    are."""


class Tracing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: Annotated[str, Auto] = ""
    """URL of an OpenTelemetry collector that takes traces over HTTP, such as
    `http://127.0.0.1:4318`; `auto` is the environment variable `OTEL_EXPORTER_OTLP_ENDPOINT`, and
    no traces without it. Needs the extra `otel`."""
