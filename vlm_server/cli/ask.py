"""`vlm-server ask`: one question about pictures and videos, answered on the terminal.

Knows when a running daemon will do and when one must be started; `client` and `own_daemon`
do the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_server.cli import options
from vlm_server.cli.client import Client, is_local, is_video
from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.own_daemon import running_daemon
from vlm_server.cli.serve import url_of
from vlm_server.errors import InvalidImage, InvalidVideo
from vlm_server.media import image_header, video_header
from vlm_server.settings import Settings

if TYPE_CHECKING:
    from vlm_server.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "ask",
        help="ask a question about pictures and videos",
        description="Asks the running daemon, or one started for this question alone.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", help="daemon to ask, such as http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--api-key", help="key to send; to this machine, else the first of server.api_keys"
    )
    options.add_model_option(parser)
    options.add_config_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer as it comes. Raises CommandFailed or ConfigError."""
    settings = options.load_settings(arguments)
    for path in arguments.files:
        check_file(path, settings)
    with ready_client(arguments, settings) as client:
        model = client.models()[0]
        for text in client.ask(model, arguments.files, arguments.question):
            print(text, end="", flush=True)
    print()
    return 0


@contextmanager
def ready_client(arguments: argparse.Namespace, settings: Settings) -> Iterator[Client]:
    """A client of a daemon whose model is loaded: the running one, or one of our own."""
    url = arguments.url or url_of(settings.server.host, settings.server.port)
    own_key = next(iter(settings.server.api_keys), None) if is_local(url) else None
    api_key = arguments.api_key or own_key
    seconds = settings.engine.start_timeout_seconds
    with Client(url, api_key) as client:
        if client.is_there() and serves_wanted_model(client, settings):
            client.wait_ready(seconds)
            yield client
            return
    if arguments.url or not is_local(url):
        raise CommandFailed(f"no daemon with the model asked for answers at {url}")
    print(f"No daemon for this answers at {url}: starting one.", file=sys.stderr)
    stop_seconds = settings.server.drain_seconds + 10
    own = running_daemon(options.settings_arguments(arguments), stop_seconds)
    with own as own_url, Client(own_url, api_key) as client:
        try:
            client.wait_ready(seconds)
        except CommandFailed as error:
            raise CommandFailed(f"the daemon started for this question: {error}") from None
        yield client


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


def serves_wanted_model(client: Client, settings: Settings) -> bool:
    """Whether a running daemon will do: any will, unless a model was asked for."""
    path = settings.model.path
    wanted = settings.model.name or (Path(path).absolute().name if path else "")
    return not wanted or wanted in client.models()
