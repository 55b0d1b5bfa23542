"""A salt per API key, so that requests with different keys share no cache entries."""

from __future__ import annotations

import hashlib

from starlette.types import Scope

_SCOPE_KEY = "vlm_server.cache_salt"
_PREFIX = b"vlm_server cache salt\0"


def attach(scope: Scope, api_key: str | None) -> None:
    """Set the salt of the request of `scope`; requests with `api_key` None share their entries."""
    scope[_SCOPE_KEY] = "" if api_key is None else _salt(api_key)


def of(scope: Scope) -> str:
    """The salt that `attach` set; empty for requests that share their entries."""
    salt = scope[_SCOPE_KEY]
    assert isinstance(salt, str)
    return salt


def _salt(api_key: str) -> str:
    return hashlib.sha256(_PREFIX + api_key.encode()).hexdigest()
