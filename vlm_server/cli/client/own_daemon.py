"""Starts a daemon for the duration of one command."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.platform import backend
from vlm_server.platform.child import launch

_LISTENING = re.compile(r"Listening on (http://\S+)")


@contextmanager
def running_daemon(
    arguments: Sequence[str], stop_seconds: float, log: IO[bytes] | None = None
) -> Iterator[str]:
    """The URL of a daemon on a free port, started here and ended when the block is left.

    It may still be loading its model. If this process is killed, the daemon sees its standard
    input close and ends too. Its log goes to `log`, or where ours does. Raises CommandFailed if it
    does not start; its own message is then in that log.
    Raises ModelLoadError if no model can run here.
    """
    backend.check()
    command = launch.command("vlm_server.cli", "serve", "--set", "log.level=warning")
    command += [*arguments, "--host", "127.0.0.1", "--port", "0", "--stop-at-eof"]
    process = subprocess.Popen(  # in our working folder: `arguments` may name paths in it
        command,
        env=launch.environment(with_preload=True),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        yield _read_url(process)
    finally:
        _end(process, stop_seconds)


def _read_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := _LISTENING.match(line):
            return found[1]
    raise CommandFailed("the daemon did not start")


def _end(process: subprocess.Popen[str], seconds: float) -> None:
    """Terminate `process`; kill it after `seconds`, or at a second Ctrl-C."""
    process.terminate()
    try:
        process.wait(seconds)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
