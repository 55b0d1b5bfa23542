"""`vlm-server connect`: shows the change of a client's settings, asks, and writes or undoes it."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from vlm_server.cli import options
from vlm_server.cli.client.daemon import address_of, is_local
from vlm_server.cli.connect import listing, service, settings_file
from vlm_server.cli.connect.change import Undone, edit, undo
from vlm_server.cli.connect.clients import CLIENTS, Client
from vlm_server.cli.connect.masking import masked, masked_key
from vlm_server.cli.connect.service import Service
from vlm_server.cli.connect.settings_file import Record, Records
from vlm_server.cli.connect.tree import Unusable
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.text import is_confirmed, printable
from vlm_server.errors import ConfigError
from vlm_server.platform.terminal import columns_of, hanging

_CONTEXT_LINES = 2
_NO_CHANGE = "Nothing was changed."
_OF_CLIENT = ("undo", "yes", "print", "model", "url", "api_key", "api_key_file", "config", "set")
"""Options that mean nothing to the list of clients."""


def run(arguments: argparse.Namespace) -> int:
    """Connect a client, undo that, or list the clients. Raises VlmServerError, OSError."""
    if arguments.client is None:
        for name in _OF_CLIENT:
            if getattr(arguments, name):
                option = f"--{name.replace('_', '-')}"
                text = f"connect {option} needs a CLIENT: without one, connect lists them"
                raise ConfigError(text)
        listing.show()
        return 0
    client = CLIENTS.get(arguments.client)
    if arguments.undo:
        if client is None:
            raise CommandFailed(f"connect {arguments.client} writes nothing that could be undone")
        return _undo(arguments, client)
    settings = options.load_settings_only(arguments)
    served = service.ask(*address_of(arguments, settings), arguments.model)
    if client is not None:
        return _connect(arguments, client, served)
    entered = ENTERED_CLIENTS[arguments.client]
    print(f"{entered.title} keeps its settings itself. To enter there:\n")
    _print_steps(entered.all_steps(served), columns_of(sys.stdout))
    return 0


def _connect(arguments: argparse.Namespace, client: Client, served: service.Service) -> int:
    path = client.file()
    file = settings_file.target_of(path)
    records = Records(arguments.client, file)
    if arguments.print:
        edits = client.edits(served, True)
        text = edit(client.form, client.form.EMPTY, edits)
        print(f"For {path}:\n\n{masked(text, [], served.key)}")
        _print_steps(client.steps(served))
        return 0
    current = settings_file.read(file)
    with _explained(path):
        before, record = current, records.load()
        if current is not None and record is not None:
            before = undo(client.form, current, record).text
        edits = client.edits(served, before is None)
        written = edit(client.form, before or client.form.EMPTY, edits)
        shown = _diff(client, path, current, written, served.key)
    if written == current:
        print(f"{path} has this already.")
        return 0
    print(f"{shown}\n")
    if not is_confirmed(f"Write this to {path}?", _NO_CHANGE, is_given=arguments.yes):
        return 1
    paths = tuple(path for path, _ in edits)
    _check_unchanged(file, current)
    records.save(Record(str(file), before, written, paths, served.url))
    settings_file.replace(file, written)
    kept = f" The file as it was is {records.backup}." if before is not None else ""
    print(f"{client.title} uses {served.model.name} at {served.url}.{kept}")
    _print_steps(itertools.chain(_mode_step(file, served.key), client.steps(served)))
    print(f"\nBack to what it was: vlm-server connect {arguments.client} --undo")
    return 0


def _undo(arguments: argparse.Namespace, client: Client) -> int:
    path = client.file()
    file = settings_file.target_of(path)
    records = Records(arguments.client, file)
    current, record = settings_file.read(file), records.load()
    if record is None:
        raise CommandFailed(f"{path} was not changed by vlm-server connect, or this is undone")
    if current is None and record.before is None:
        records.remove()
        print(f"{path} is gone already.")
        return 0
    with _explained(path):
        undone = Undone(record.before) if current is None else undo(client.form, current, record)
        shown = _diff(client, path, current, undone.text, None)
    if undone.text != current:
        print(f"{shown}\n")
        if arguments.print:
            return 0
        if not is_confirmed(f"Write this to {path}?", _NO_CHANGE, is_given=arguments.yes):
            return 1
        _check_unchanged(file, current)
        settings_file.replace(file, undone.text)
    records.remove()
    for kept in undone.kept:
        print(f"{'.'.join(kept)} was changed since, and stays as it is.")
    print(f"{client.title} is as it was.")
    return 0


def _mode_step(file: Path, key: str | None) -> Iterator[str]:
    """Advice on a file that has the key, and that others may read."""
    is_open = file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    if key and is_open and key in (settings_file.read(file) or ""):
        command = f"chmod 600 {shlex.quote(str(file))}"
        yield f"Others can read {file}, which has the API key now: {command}"


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Make an Unusable file an error of the command that says where it is broken."""
    try:
        yield
    except Unusable as error:
        line = f", line {error.line}" if error.line else ""
        raise CommandFailed(
            f"{path}{line}: {error}; nothing was changed (--print shows what belongs there)"
        ) from None


def _check_unchanged(file: Path, text: str | None) -> None:
    if settings_file.read(file) != text:
        raise CommandFailed(f"{file} was changed meanwhile: nothing was written, try again")


def _diff(
    client: Client, path: Path, before: str | None, after: str | None, key: str | None
) -> str:
    old, new = before or "", after or ""
    old_name, new_name = (
        str(path) if text is not None else "/dev/null" for text in (before, after)
    )
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), old_name, new_name, lineterm="", n=_CONTEXT_LINES
    )
    trees = [client.form.parse(text or client.form.EMPTY) for text in (old, new)]
    return printable(masked("\n".join(lines), trees, key))


def _print_steps(steps: Iterator[str], columns: int | None = None) -> None:
    """Print the steps, numbered if there are several; wrapped if `columns` are given."""
    lines = [printable(step) for step in steps]
    for number, line in enumerate(lines, 1):
        print(hanging(f"{number:>3}. ", line, columns) if len(lines) > 1 else line)


# ---- steps -------------------------------------------------------------------------------


_ELSEWHERE = (
    "Where {title} runs in a container or on another machine, 127.0.0.1 is not this machine: use "
    "this machine's address, for the daemon too (settings server.host, server.api_keys)."
)


class EnteredClient(NamedTuple):
    """A client whose user enters the settings, by `steps`."""

    title: str
    steps: Callable[[Service], Iterator[str]]
    often_elsewhere: bool = False

    def all_steps(self, service: Service) -> Iterator[str]:
        """What to do, in order."""
        yield from self.steps(service)
        if self.often_elsewhere and is_local(service.url):
            yield _ELSEWHERE.format(title=self.title)


def _key(service: Service) -> str:
    return f"the daemon's, {masked_key(service.key)}" if service.key else "none"


def _cline(service: Service) -> Iterator[str]:
    """https://docs.cline.bot/provider-config/openai-compatible"""
    model = service.model
    yield "In Cline's panel in VS Code, open its settings (the gear)."
    yield "API Provider: OpenAI Compatible"
    yield f"Base URL: {service.url}"
    yield f"API Key: {_key(service)}"
    yield f"Model ID: {model.name}"
    limits = f", Context Window Size: {model.context_tokens}" if model.context_tokens else ""
    yield f"Model Configuration: Supports Images: {'on' if model.reads_images else 'off'}{limits}"


def _open_webui(service: Service) -> Iterator[str]:
    """https://docs.openwebui.com/getting-started/quick-start/connect-a-provider"""
    yield "As an administrator, open Admin Settings, Connections, OpenAI."
    yield "Add a connection (+)."
    yield f"URL: {service.url}"
    yield f"API Key: {_key(service)}"
    yield f"Save it, and choose {service.model.name} in a new chat."


def _home_assistant(service: Service) -> Iterator[str]:
    """https://www.home-assistant.io/integrations/ollama"""
    yield "Open Settings, Devices & services, Add integration, Ollama."
    yield f"URL: {service.root}"
    yield f"API key, if the form has a field for it: {_key(service)}"
    yield f"Model: {service.model.name}"
    if service.model.context_tokens:
        yield f"Context window size: {service.model.context_tokens}"


ENTERED_CLIENTS = {
    "cline": EnteredClient("Cline", _cline),
    "open-webui": EnteredClient("Open WebUI", _open_webui, often_elsewhere=True),
    "home-assistant": EnteredClient("Home Assistant", _home_assistant, often_elsewhere=True),
}
