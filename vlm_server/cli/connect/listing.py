"""The list of clients: which are installed, and which are connected to what."""

from __future__ import annotations

import shutil
import sys

from vlm_server.cli.connect import settings_file
from vlm_server.cli.connect.change import undo
from vlm_server.cli.connect.clients import CLIENTS, Client
from vlm_server.cli.connect.command import ENTERED
from vlm_server.cli.connect.settings_file import Records
from vlm_server.cli.connect.tree import Unusable
from vlm_server.cli.text import columns_of, printable, table
from vlm_server.errors import VlmServerError

_HINTS = f"""
Connect one: vlm-server connect CLIENT (--undo takes that back)
{", ".join(ENTERED)} keep their settings themselves: it prints what to enter."""


def show() -> None:
    """Print the clients, and how to connect one."""
    rows = [("CLIENT", "INSTALLED", "CONNECTED")]
    for name, client in CLIENTS.items():
        try:
            installed = "yes" if _is_installed(client) else "no"
            rows.append((name, installed, _connection(name, client)))
        except (VlmServerError, Unusable, OSError):
            rows.append((name, "yes", "its settings can't be changed: connect it to see why"))
    print(printable(table(rows, columns_of(sys.stdout))))
    print(_HINTS)


def _is_installed(client: Client) -> bool:
    """Whether its program can be started, or its folder of settings is there."""
    return any(map(shutil.which, client.programs)) or client.file().parent.is_dir()


def _connection(name: str, client: Client) -> str:
    """The URL that `connect` put into its settings and that is still there, else `no`."""
    file = settings_file.target_of(client.file())
    current, record = settings_file.read(file), Records(name, file).load()
    if current is None or record is None:
        return "no"
    return (record.url or "yes") if undo(client.form, current, record).text != current else "no"
