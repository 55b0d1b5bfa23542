"""API keys: which are accepted, whose they are, and what each may do.

Keeps hashes of the keys, never the keys.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from vlm_server.api.http.access import cache_salt
from vlm_server.api.http.access.key_file import KeyEntry, WatchedKeyFile
from vlm_server.settings import Server
from vlm_server.settings.paths import expanded

CHECK_SECONDS = 1.0
"""The file is looked at this often at most, and only when a request comes."""

_SCOPE_KEY = "vlm_server.api_key"
_PREFIX = b"vlm_server API key\0"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An accepted key: its hash, the name it has in the log, and what it may do.

    `max_requests` may be in flight at once; None is any number.
    """

    name: str
    digest: bytes
    cache_salt: str
    is_admin: bool
    max_requests: int | None = None


class KeyRing:
    """All accepted keys: `server.api_keys`, and those in `server.api_key_file`.

    Use from the event loop. Raises ConfigError if the file can't be used.
    """

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._own = tuple(
            _api_key(f"api_keys[{i}]", key, is_admin=True) for i, key in enumerate(server.api_keys)
        )
        self._file: WatchedKeyFile | None = None
        self._of_file: tuple[ApiKey, ...] = ()
        self._check_at = clock() + CHECK_SECONDS
        if server.api_key_file:
            self._file = WatchedKeyFile(expanded(server.api_key_file))
            self._of_file = _api_keys(self._file.read())
        self.needs_key = server.needs_key

    def find(self, given: bytes) -> ApiKey | None:
        """The accepted key that `given` is, if it is one. How long this takes tells no key."""
        self._refresh()
        digest, found = _digest(given), None
        for key in (*self._of_file, *self._own):
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def _refresh(self) -> None:
        now = self._clock()
        if self._file is None or now < self._check_at:
            return
        self._check_at = now + CHECK_SECONDS
        entries = self._file.read_if_changed()
        if entries is not None:
            self._of_file = _api_keys(entries)


def attach(scope: Scope, key: ApiKey | None) -> None:
    """Set the key that the request of `scope` came with; None if none is needed."""
    scope[_SCOPE_KEY] = key


def of(scope: Scope) -> ApiKey | None:
    """The key that `attach` set."""
    key = scope[_SCOPE_KEY]
    assert key is None or isinstance(key, ApiKey)
    return key


def is_admin(scope: Scope) -> bool:
    """Whether the request may do what takes an admin key: everybody may if no key is needed."""
    key = of(scope)
    return key is None or key.is_admin


def owner_of(scope: Scope) -> str:
    """Whose what the request leaves on the server is: its key's, whatever that is called.

    A name may be given to somebody else's key. Everybody's without keys.
    """
    key = of(scope)
    return "" if key is None else key.cache_salt


def check_settings(server: Server) -> None:
    """Raises ConfigError if there is a key file and it can't be used."""
    KeyRing(server)


def _api_keys(entries: dict[str, KeyEntry]) -> tuple[ApiKey, ...]:
    return tuple(
        _api_key(name, entry.key, is_admin=entry.admin, max_requests=entry.max_requests)
        for name, entry in entries.items()
    )


def _api_key(name: str, key: str, *, is_admin: bool, max_requests: int | None = None) -> ApiKey:
    return ApiKey(name, _digest(key.encode()), cache_salt.of_key(key), is_admin, max_requests)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(_PREFIX + key).digest()
