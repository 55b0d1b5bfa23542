"""Changes of the service: one at a time, and undone if they fail."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.service.manager import Files, ServiceManager
from vlm_server.errors import VlmServerError


@contextlib.contextmanager
def locked(manager: ServiceManager) -> Iterator[None]:
    """Nobody else changes the service meanwhile. Raises CommandFailed if somebody does.

    The folder of its files is locked, so that no file is left behind.
    """
    folder = manager.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CommandFailed(f"can't write {folder}: {error.strerror}") from None
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def undone_if_it_fails(manager: ServiceManager) -> Iterator[None]:
    """Whatever ends the block early, the service is as it was before: its files, and whether it
    runs. Of our own errors, the message then says so.
    """
    before = _read(manager)
    was_running = manager.is_running()
    try:
        yield
    except VlmServerError as error:
        raise CommandFailed(f"{error}\n{_undo(manager, before, was_running)}") from None
    except BaseException:
        _undo(manager, before, was_running)
        raise


def write(new: Files) -> None:
    """Replace the files, each at once, readable by their owner only. Raises CommandFailed."""
    for path, content in new.items():
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.touch(mode=0o600)
            draft.write_bytes(content)
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise CommandFailed(f"can't write {path}: {error.strerror}") from None


def remove(manager: ServiceManager) -> None:
    """Stop the service and remove its files."""
    manager.unload()
    for path in manager.paths:
        path.unlink(missing_ok=True)
    manager.forget()


def is_moved(manager: ServiceManager, new: Files) -> bool:
    """Whether the address that the service's manager listens on is another in the `new` files."""
    before, path = _read(manager), manager.paths[-1]
    return path not in before or before[path] != new.get(path)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandFailed(
            "another 'vlm-server service' command is running: try again when it is done"
        ) from None


def _read(manager: ServiceManager) -> Files:
    return {path: path.read_bytes() for path in manager.paths if path.exists()}


def _undo(manager: ServiceManager, before: Files, was_running: bool) -> str:
    """Returns what was done."""
    if manager.path not in before:
        remove(manager)
        return "Nothing was installed."
    moves = is_moved(manager, before)
    added = set(_read(manager)) - set(before)
    if added:
        manager.unload()
    for path in added:
        path.unlink()
    try:
        write(before)
        if was_running:
            manager.load(is_moved=moves)
            return "The service that was installed before runs again."
        manager.stop()
        manager.forget()
    except CommandFailed as error:
        return f"The files are those from before, but that service does not start: {error}"
    return "The service that was installed before is as it was: not running."
