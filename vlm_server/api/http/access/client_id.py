"""Whose request it is, as far as fair shares go: the name of its API key."""

from __future__ import annotations

from starlette.types import Scope

_SCOPE_KEY = "vlm_server.client_id"


def attach(scope: Scope, client: str) -> None:
    """Set the client of the request of `scope`.

    All requests without a key are one client's, "": without keys only this machine can connect, and
    its addresses tell nobody apart.
    """
    scope[_SCOPE_KEY] = client


def of(scope: Scope) -> str:
    """The client that `attach` set."""
    client = scope[_SCOPE_KEY]
    assert isinstance(client, str)
    return client
