"""The list of clients: which are installed, and which are connected to what."""

from __future__ import annotations

import shutil
import sys

from vlm_server.cli.connect import settings_file, tree
from vlm_server.cli.connect.change import undo
from vlm_server.cli.connect.clients import CLIENTS, Client
from vlm_server.cli.connect.command import ENTERED
from vlm_server.cli.connect.settings_file import Records
from vlm_server.cli.connect.tree import Unusable
from vlm_server.cli.text import printable, table
from vlm_server.errors import VlmServerError
from vlm_server.platform.terminal import columns_of, hanging

_HINTS = (
    "",
    "Connect one: 'vlm-server connect CLIENT' (--undo takes that back)",
    f"{', '.join(ENTERED)} keep their settings themselves: it prints what to enter.",
)


def show() -> None:
    """Print the clients, and how to connect one."""
    rows = [("CLIENT", "INSTALLED", "CONNECTED")]
    for name, client in CLIENTS.items():
        try:
            connection = _connection(name, client)
        except (VlmServerError, Unusable, OSError):
            connection = "its settings can't be changed: connect it to see why"
        rows.append((name, _installation(client), connection))
    columns = columns_of(sys.stdout)
    print(printable(table(rows, columns)))
    for hint in _HINTS:
        print(hanging("", hint, columns))


def _installation(client: Client) -> str:
    """Whether its program can be started, or its folder of settings is there."""
    if any(map(shutil.which, client.programs)):
        return "yes"
    try:
        return "yes" if client.folder().is_dir() else "no"
    except (VlmServerError, OSError):
        return "unknown"


def _connection(name: str, client: Client) -> str:
    """The URL that `connect` put into its settings, if all of it is still there, else a word."""
    file = settings_file.target_of(client.file())
    current, record = settings_file.read(file), Records(name, file).load()
    if current is None or record is None:
        return "no"
    now, written = (client.form.parse(text) for text in (current, record.written))
    if all(tree.get(now, path) == tree.get(written, path) for path in record.paths):
        return record.url or "yes"
    undone = undo(client.form, current, record)
    return "no" if undone.text == current and not undone.kept else "changed since"
