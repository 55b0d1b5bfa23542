"""The exit codes of `vlm-server`. A service manager restarts after some, and not after others."""

from __future__ import annotations

DONE = 0
FAILURE = 1
WRONG_SETTINGS = 2
"""Wrong arguments or settings: a restart does not help."""
MODEL_UNUSABLE = 3
"""The model can't be loaded, or does not fit: a restart does not help."""
DEFECT = 70
"""An error that nobody foresaw (EX_SOFTWARE of sysexits.h)."""
NOT_AVAILABLE = 75
"""What the settings name is not there at present: a port in use, an address that is not up, a disk
that is not mounted. It may be later (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
CLOSED_PIPE = 141

FINAL = (WRONG_SETTINGS, MODEL_UNUSABLE)

MEANINGS = {
    DONE: "Done; for serve, stopped as it was told to.",
    FAILURE: "It failed: an answer, a file, the network; or what was asked about is not so.",
    WRONG_SETTINGS: "Wrong arguments or settings.",
    MODEL_UNUSABLE: "The model can't be had, can't be loaded, or does not fit.",
    DEFECT: "A defect of the program. Please report it, with what --debug prints.",
    NOT_AVAILABLE: "What the settings name is not there at present: a port in use, a disk that is "
    "not mounted, a hub that can't be reached. Try again later.",
    INTERRUPTED: "Interrupted with Ctrl-C (the program ends by SIGINT).",
    CLOSED_PIPE: "Whoever read the output has closed it, as head does.",
}
"""What `--help`, the manual page and docs/cli.md say of each."""
