"""The error that a command raises to end with exit code 1."""

from __future__ import annotations

from vlm_server.errors import VlmServerError


class CommandFailed(VlmServerError):
    """A command failed: the message is printed to stderr and the exit code is 1."""
