"""Whose request it is, as far as fair shares go: a hash of the API key, never the key."""

from __future__ import annotations

import hashlib

from starlette.types import Scope

_SCOPE_KEY = "vlm_server.client_id"
_PREFIX = b"vlm_server client\0"
_HEX_CHARS = 16


def attach(scope: Scope, api_key: str | None) -> None:
    """Set the client of the request of `scope`.

    All requests without a key are one client's: without keys only this machine can connect, and
    its addresses tell nobody apart.
    """
    scope[_SCOPE_KEY] = "" if api_key is None else _digest(api_key)


def of(scope: Scope) -> str:
    """The client that `attach` set; empty for requests without a key."""
    client = scope[_SCOPE_KEY]
    assert isinstance(client, str)
    return client


def _digest(api_key: str) -> str:
    return hashlib.sha256(_PREFIX + api_key.encode()).hexdigest()[:_HEX_CHARS]
