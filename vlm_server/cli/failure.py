"""Failures of a command. Knows exit codes; knows no command."""

from __future__ import annotations

from vlm_server.errors import VlmServerError


class CommandFailed(VlmServerError):
    """A command could not do its work: the message goes to stderr, the exit code is 1."""
