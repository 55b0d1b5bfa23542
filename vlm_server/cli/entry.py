"""The program's entry point. It handles a Ctrl-C while the commands are being imported."""

from __future__ import annotations

import signal


def main() -> int:
    """Run `vlm-server`; a Ctrl-C during the imports ends it without a traceback."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vlm_server.cli.main import main as run  # takes a moment

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
