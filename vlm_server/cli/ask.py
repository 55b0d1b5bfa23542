"""`vlm-server ask`: one question about images and videos, answered on the terminal.

Asks the running daemon, or starts one for this question alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import mimetypes
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from vlm_server.api.http.access import key_file
from vlm_server.cli import options
from vlm_server.cli.client.answer import ChunkReader, error_message
from vlm_server.cli.client.chat import ChatClient
from vlm_server.cli.client.daemon import Daemon, is_local, refusal
from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.own_daemon import running_daemon
from vlm_server.cli.serve import url_of
from vlm_server.errors import InvalidImage, InvalidVideo
from vlm_server.media import image_header, video_header
from vlm_server.settings import Server, Settings

if TYPE_CHECKING:
    from vlm_server.cli.options import Commands

_TIMEOUT = httpx.Timeout(10.0, read=None)  # a long prompt may take minutes to prefill
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "ask",
        help="ask a question about images and videos",
        description="Asks the running daemon, or starts one for this question alone.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", help="daemon to ask, such as http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--api-key",
        help="API key to send (default for a daemon on this machine: the first of the settings')",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="file that holds the API key to send, which others can then not see as they see "
        "command lines",
    )
    options.add_model_option(parser)
    options.add_config_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer as it arrives. Raises CommandFailed or ConfigError."""
    settings = options.load_settings(arguments)
    for path in arguments.files:
        check_file(path, settings)
    with ready_daemon(arguments, settings) as daemon:
        model = daemon.models()[0]
        asyncio.run(print_answer(daemon, model, arguments.files, arguments.question))
    print()
    return 0


@contextmanager
def ready_daemon(arguments: argparse.Namespace, settings: Settings) -> Iterator[Daemon]:
    """A daemon whose model is loaded: the running one, or one started for this command."""
    url = arguments.url or url_of(settings.server.host, settings.server.port)
    api_key = given_key(arguments) or (own_key(settings.server) if is_local(url) else None)
    seconds = settings.engine.start_timeout_seconds
    with Daemon(url, api_key) as daemon:
        if daemon.is_there() and serves_wanted_model(daemon, settings):
            daemon.wait_ready(seconds)
            yield daemon
            return
    if arguments.url or not is_local(url):
        raise CommandFailed(f"no daemon with the requested model at {url}")
    print(f"No daemon at {url} can answer this: starting one.", file=sys.stderr)
    stop_seconds = settings.server.drain_seconds + 10
    own = running_daemon(options.settings_arguments(arguments), stop_seconds)
    with own as own_url, Daemon(own_url, api_key) as daemon:
        try:
            daemon.wait_ready(seconds)
        except CommandFailed as error:
            raise CommandFailed(f"the daemon started for this question: {error}") from None
        yield daemon


def given_key(arguments: argparse.Namespace) -> str | None:
    """The API key of the command line. Raises CommandFailed if its file can't be read."""
    path: Path | None = arguments.api_key_file
    if path is None:
        return arguments.api_key  # type: ignore[no-any-return]
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CommandFailed(f"can't read an API key from {path}") from None


def own_key(server: Server) -> str | None:
    """The first API key of the settings. Raises ConfigError if their key file can't be used."""
    if server.api_keys:
        return server.api_keys[0]
    if server.api_key_file:
        entries = key_file.read(Path(server.api_key_file).expanduser())
        return next(iter(entries.values())).key
    return None


async def print_answer(daemon: Daemon, model: str, files: Sequence[Path], question: str) -> None:
    """Print the answer's text as it arrives. Raises CommandFailed."""
    content = [*map(part_of, files), {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": model, "messages": messages, "stream": True}).encode()
    try:
        async for text in stream_text(daemon, body):
            print(text, end="", flush=True)
    except httpx.HTTPError as error:
        raise CommandFailed(f"the connection to {daemon.url} broke: {error}") from None


async def stream_text(daemon: Daemon, body: bytes) -> AsyncIterator[str]:
    """The text of a streamed answer as it arrives. Raises CommandFailed and httpx.HTTPError."""
    client = ChatClient(
        daemon.url,
        api_key=daemon.api_key,
        timeout=_TIMEOUT,
        trust_env=not is_local(daemon.url),
    )
    async with client, client.post(body, len(body)) as response:
        if response.status != 200:
            said = b"".join([data async for _, data in response.received()])
            raise CommandFailed(refusal(response.status, said))
        reader = ChunkReader()
        async for _, data in response.received():
            for chunk in reader.feed(data):
                if chunk.error is not None:
                    raise CommandFailed(error_message(chunk.error))
                yield chunk.content
        if not reader.has_ended:
            raise CommandFailed("the answer ended before it was complete")


def check_file(path: Path, settings: Settings) -> None:
    """Raises CommandFailed for what the daemon would refuse, before one is started for it."""
    try:
        data = path.read_bytes()
        if is_video(path):
            video_header.read(data, str(path))
        else:
            image_header.read(data, str(path), settings.limits.max_image_pixels)
    except OSError as error:
        raise CommandFailed(f"can't read {path}: {error.strerror}") from None
    except (InvalidImage, InvalidVideo) as error:
        raise CommandFailed(f"{path}: {error.message}") from None


def serves_wanted_model(daemon: Daemon, settings: Settings) -> bool:
    """Whether `daemon` will do: any does, unless the settings name a model."""
    path = settings.model.path
    wanted = settings.model.name or (Path(path).absolute().name if path else "")
    return not wanted or wanted in daemon.models()


def is_video(path: Path) -> bool:
    """Whether the file's name is that of a video."""
    return (mimetypes.guess_type(path.name)[0] or "").startswith("video/")


def part_of(path: Path) -> dict[str, Any]:
    """The image or video in the file as a content part of a message."""
    kind = "video_url" if is_video(path) else "image_url"
    return {"type": kind, kind: {"url": data_url(path)}}


def data_url(path: Path) -> str:
    """The file's bytes with the MIME type that its first bytes or else its name imply."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CommandFailed(f"can't read {path}: {error.strerror}") from None
    guesses = [kind for signature, kind in _SIGNATURES if data.startswith(signature)]
    kind = guesses[0] if guesses else mimetypes.guess_type(path.name)[0]
    return f"data:{kind or 'application/octet-stream'};base64,{base64.b64encode(data).decode()}"
