"""Which daemon is asked, and for which of its models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vlm_server.cli import options
from vlm_server.cli.client.address import address_of
from vlm_server.cli.client.daemon import Daemon, is_local
from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.own_daemon import running_daemon
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.usage.nearest import did_you_mean
from vlm_server.errors import ConfigError
from vlm_server.hub import find
from vlm_server.hub.names import HubName
from vlm_server.settings import Settings
from vlm_server.settings.paths import expanded

Model = dict[str, Any]
"""What `/v1/models` says of one model."""


@contextmanager
def ready_daemon(
    arguments: argparse.Namespace, settings: Settings
) -> Iterator[tuple[Daemon, Model]]:
    """A daemon whose model is loaded, and that model: a running one, or one started for this.

    Raises CommandFailed if there is none, or not with this model; ConfigError for a model that
    nobody has.
    """
    url, api_key = address_of(arguments, settings)
    with Daemon(url, api_key) as daemon:
        listed = daemon.listed() if daemon.is_there() else None
        if listed is not None and _chosen(listed, arguments.model, settings) is not None:
            yield daemon, _wait_for(daemon, arguments, settings)
            return
    _check_may_start(arguments, settings, url, listed)
    print(f"No daemon at {url} can answer this: starting one.", file=sys.stderr)
    own = running_daemon(options.settings_arguments(arguments), settings.server.drain_seconds + 10)
    with own as own_url, Daemon(own_url, api_key) as daemon:
        try:
            daemon.wait_ready(settings.engine.start_timeout_seconds)  # it shows its progress
            model = daemon.listed()[0]
        except CommandFailed as error:
            raise CommandFailed(f"the daemon started for this question: {error}") from None
        yield daemon, model


def _wait_for(daemon: Daemon, arguments: argparse.Namespace, settings: Settings) -> Model:
    """The model of a daemon that is there, once it is loaded: more is known of it then."""
    progress = ProgressLine(sys.stderr)
    try:
        daemon.wait_ready(settings.engine.start_timeout_seconds, progress.show)
    finally:
        progress.clear()
    listed = daemon.listed()
    return _chosen(listed, arguments.model, settings) or listed[0]


def _chosen(listed: Sequence[Model], wanted: str | None, settings: Settings) -> Model | None:
    """The model that is `wanted`, else that of the settings, else the first."""
    names = _names_of(wanted, settings) if wanted else [settings.model.name]
    if not any(names):
        return listed[0] if listed else None
    return next((model for model in listed if model["id"] in names), None)


def _names_of(wanted: str, settings: Settings) -> list[str]:
    """What the API may call a model that the command line calls `wanted`."""
    found = find.find(wanted, settings.model.search_paths)
    hub = HubName.parse(wanted)
    return [wanted, *([found.name] if found else []), *([hub.repo] if hub else [])]


def _check_may_start(
    arguments: argparse.Namespace, settings: Settings, url: str, listed: Sequence[Model] | None
) -> None:
    """Raises CommandFailed or ConfigError where a daemon of our own would not help."""
    served = [str(model["id"]) for model in listed or ()]
    wanted = arguments.model
    if arguments.url or not is_local(url):
        if listed is None:
            raise CommandFailed(f"no daemon answers at {url}: is it running, is the URL right?")
        close = did_you_mean(str(wanted), served)
        has = f" (it has {', '.join(served)})"
        raise CommandFailed(f"{url} has no model {wanted!r}{close or has}")
    if not wanted or HubName.parse(wanted) or expanded(wanted).is_dir():
        return
    if find.find(wanted, settings.model.search_paths) is None:
        local = [one.name for one in find.every(settings.model.search_paths)]
        close = did_you_mean(wanted, [*served, *local])
        raise ConfigError(
            f"--model {wanted} is neither a folder nor a model on this machine{close}"
        )
