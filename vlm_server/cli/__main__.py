"""The program's entry: prepares signals and standard files before the imports."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `-m` puts the working folder first, where a `queue.py` may lie

import io
import os
import signal

_NUM_STANDARD_FILES = 3


def main() -> int:
    """Run `vlm-server`. A Ctrl-C ends it without a traceback, even while it is imported."""
    fill_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names and answers may hold anything
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vlm_server.cli import exit_codes
    from vlm_server.cli.main import main as run  # slow to import

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run()
    if code == exit_codes.INTERRUPTED and is_heard:  # or a shell's loop would go on
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


def fill_standard_files() -> None:
    """Open /dev/null in place of standard files that are closed.

    Otherwise the next file or connection would get their numbers, and this program's output, and
    Python would have no `sys.stdout`.
    """
    for number in range(_NUM_STANDARD_FILES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115  open until the end
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
