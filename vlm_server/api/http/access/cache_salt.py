"""A salt per API key, so that requests with different keys share no cache entries."""

from __future__ import annotations

import hashlib

from starlette.types import Scope

_SCOPE_KEY = "vlm_server.cache_salt"
_PREFIX = b"vlm_server cache salt\0"


def attach(scope: Scope, salt: str) -> None:
    """Set the salt of the request of `scope`; requests with an empty one share their entries."""
    scope[_SCOPE_KEY] = salt


def of(scope: Scope) -> str:
    """The salt that `attach` set."""
    salt = scope[_SCOPE_KEY]
    assert isinstance(salt, str)
    return salt


def of_key(api_key: str) -> str:
    """The salt of requests with `api_key`; the same after a restart, for the disk cache."""
    return hashlib.sha256(_PREFIX + api_key.encode()).hexdigest()
