"""Exit codes of `vlm-server`. A service manager restarts after some, and not after others."""

from __future__ import annotations

from vlm_server.errors import VlmServerError

DONE = 0
FAILURE = 1
WRONG_SETTINGS = 2
"""Wrong arguments or settings: a restart does not help."""
MODEL_UNUSABLE = 3
"""The model can't be loaded, or does not fit: a restart does not help."""
DEFECT = 70
"""An unforeseen error (EX_SOFTWARE of sysexits.h)."""
NOT_AVAILABLE = 75
"""A resource of the settings is not available at present: a port in use, an address that is not up,
a disk that is not mounted. A restart may help (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
CLOSED_PIPE = 141

FINAL = (WRONG_SETTINGS, MODEL_UNUSABLE)

MEANINGS = {
    DONE: "Done; for serve, stopped as it was told to.",
    FAILURE: "Failed: for example an answer, a file or the network; or a check found a problem.",
    WRONG_SETTINGS: "Wrong arguments or settings.",
    MODEL_UNUSABLE: "The model can't be found, loaded, or fitted into memory.",
    DEFECT: "A bug. Please report it, with the output of --debug.",
    NOT_AVAILABLE: "What the settings name is not there at present: a port in use, a disk that is "
    "not mounted, a hub that can't be reached. Try again later.",
    INTERRUPTED: "Interrupted with Ctrl-C (the program ends by SIGINT).",
    CLOSED_PIPE: "The reader of the output closed the pipe, as head does.",
}
"""Meanings of the codes in `--help`, the manual page and docs/cli.md."""

SERVICE_READY, SERVICE_NOT_READY, SERVICE_NOT_RUNNING, SERVICE_NOT_INSTALLED = 0, 1, 3, 4
SERVICE_MEANINGS = {
    SERVICE_READY: "The service is ready.",
    SERVICE_NOT_READY: "It runs, but is not ready.",
    WRONG_SETTINGS: MEANINGS[WRONG_SETTINGS],
    SERVICE_NOT_RUNNING: "It does not run.",
    SERVICE_NOT_INSTALLED: "It is not installed.",
    DEFECT: MEANINGS[DEFECT],
}
"""Exit codes of `vlm-server service status`: those of `systemctl status`, and 1."""


class CommandFailed(VlmServerError):
    """A command failed: the message is printed to stderr and the exit code is 1."""
