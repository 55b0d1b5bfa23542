"""Where a command finds its daemon, and with which key: its options, else the settings."""

from __future__ import annotations

import argparse

from vlm_server.cli.client.daemon import api_url, is_local
from vlm_server.cli.client.keys import own_key, read_key
from vlm_server.cli.serve import url_of
from vlm_server.settings import Settings


def address_of(arguments: argparse.Namespace, settings: Settings) -> tuple[str, str | None]:
    """The URL of the API, and the API key, by `options.add_daemon_options`.

    Raises CommandFailed or ConfigError for a key that can't be read.
    """
    given: str | None = arguments.url
    url = api_url(given) if given else url_of(settings.server.host, settings.server.port)
    if arguments.api_key_file is not None:
        return url, read_key(arguments.api_key_file)
    key: str | None = arguments.api_key
    return url, key or (own_key(settings.server) if is_local(url) else None)
