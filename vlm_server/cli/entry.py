"""Where the program begins. Knows nothing but how to be interrupted while it is imported."""

from __future__ import annotations

import signal


def main() -> int:
    """`vlm-server`: a Ctrl-C before the commands are there ends it without a word."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vlm_server.cli.main import main as run  # takes a moment

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
