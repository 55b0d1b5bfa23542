"""Settings of the front process: connections, limits on requests, URLs and deadlines."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vlm_server.settings.quantities import MIB


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
            "readable by you alone, and read again when it changes: see docs/api.md."
        ),
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Accepted Host headers; empty means loopback names and `server.host`, or "
            "any name if keys are needed and `server.host` is all addresses. Stops DNS rebinding."
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Web pages of other origins that may use the API in a browser: "
            "`https://app.example`, `http://localhost:3000`, `null` (files, sandboxes), "
            "`chrome-extension://*` or another scheme of extensions or apps; `*` is all, only "
            "without API keys."
        ),
    ] = ()
    drain_seconds: Annotated[
        float, Meta(ge=0, description="Time for running requests to finish on shutdown.")
    ] = 20.0
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum open connections; past it, a new one replaces one that has no "
            "complete request. Fewer if the limit on open files is low.",
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
            description="Silence in a stream after which a sign of life is sent (a comment, a "
            "`ping` or an empty line of Ollama's), so that clients and proxies do not give up "
            "during a long prefill.",
        ),
    ] = 5.0
    keepalive: Annotated[
        Literal["comment", "empty_chunk", "off"],
        Meta(
            description="That sign of life: `comment`; `empty_chunk` for clients that fail at "
            "comments, an event of the dialect that adds nothing; or `off`. The header "
            "`X-VLM-Keepalive` chooses for a request. In all but `off`, Anthropic's clients get a "
            "`ping` and Ollama's an empty line."
        ),
    ] = "comment"
    model_aliases: Annotated[
        tuple[str, ...],
        Meta(
            description="More names that the model is asked for by: `gpt-4o`, or patterns such as "
            "`gpt-*` and `claude-*` (`*` is any text, `?` one character, `[ab]` one of these)."
        ),
    ] = ()
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        Meta(
            description="What happens to fields of a request that are unknown: refused by name, or "
            "ignored and named in the header `X-VLM-Ignored` and in the log."
        ),
    ] = "refuse"
    responses_store_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum bytes of the turns that are kept for `/v1/responses`, with their "
            "pictures. API keys share it; the oldest turns of the one with the most are dropped "
            "first. 0 keeps none.",
        ),
    ] = 64 * MIB
    responses_store_seconds: Annotated[
        float,
        Meta(gt=0, description="Time for which a turn of `/v1/responses` is kept."),
    ] = 3600.0

    @property
    def needs_key(self) -> bool:
        """Whether a request needs an API key."""
        return bool(self.api_keys or self.api_key_file)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="Maximum size of a request's body.")
    ] = 64 * MIB
    max_messages: Annotated[int, Meta(ge=1, description="Maximum messages in a request.")] = 2048
    max_parts: Annotated[
        int, Meta(ge=1, description="Maximum content parts in a request, over all its messages.")
    ] = 8192
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
    default_max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Longest answer of a request that names no `max_tokens`; 0 is as long as "
            "the context has room for.",
        ),
    ] = 4096
    max_stop_strings: Annotated[int, Meta(ge=0, description="Maximum `stop` strings.")] = 16
    max_requests: Annotated[
        int, Meta(ge=1, description="Maximum requests in flight; more are answered 429.")
    ] = 64
    max_waiting_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum size of all bodies of requests that the device has not begun "
            "with; beyond it, requests are answered 429. At least `max_body_bytes` is allowed; 0 "
            "is automatic: 1/16 of the machine's memory, at least four bodies.",
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
    parsing_processes: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum processes that read bodies with media, and large ones. One is "
            "kept for bodies under 16 MiB, if there are several.",
        ),
    ] = 2
    parsing_timeout_seconds: Annotated[
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
