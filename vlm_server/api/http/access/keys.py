"""API keys: which are accepted, and what each may do. Keeps hashes of the keys, never the keys."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Scope

from vlm_server.api.http.access.key_file import KeyEntry, WatchedKeyFile
from vlm_server.errors import KeyLimitReached
from vlm_server.settings import Server
from vlm_server.settings.paths import expanded

CHECK_SECONDS = 1.0
"""The shortest time between two looks at the key file, which only requests cause."""

_SCOPE_KEY = "vlm_server.api_key"
_KEY_PREFIX = b"vlm_server API key\0"
_SALT_PREFIX = b"vlm_server cache salt\0"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An accepted key: its hash, the name it has in the log, and what it may do.

    `identity` is a hash, too, the same after a restart: the owner of stored responses and the salt
    of cache entries. The name is neither, since it may later be given to somebody else's key.
    `max_requests` may be in flight at once; None is any number.
    """

    name: str
    digest: bytes
    identity: str
    is_admin: bool
    max_requests: int | None = None


NO_KEY = ApiKey("", b"", "", is_admin=True)
"""Stands for the key where none is needed: only this machine can connect, as one client."""


class KeyRing:
    """The keys of `server.api_keys` and `server.api_key_file`. Raises ConfigError."""

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
        """The accepted key that equals `given`, or None. Compares in constant time."""
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


class KeySlots:
    """The number of requests in flight by the name of their API key."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()

    @contextmanager
    def hold(self, key: ApiKey) -> Iterator[None]:
        """Hold a slot of `key` for the `with` block. Raises KeyLimitReached if all are taken."""
        if key.max_requests is not None and self.taken[key.name] >= key.max_requests:
            raise KeyLimitReached(
                f"{key.max_requests} requests with this API key are in flight, as many as it may."
            )
        self.taken[key.name] += 1
        try:
            yield
        finally:
            self.taken[key.name] -= 1
            if not self.taken[key.name]:
                del self.taken[key.name]


def attach(scope: Scope, key: ApiKey) -> None:
    """Set the key that the request of `scope` came with."""
    scope[_SCOPE_KEY] = key


def key_of(scope: Scope) -> ApiKey:
    """The key that `attach` set."""
    key = scope[_SCOPE_KEY]
    assert isinstance(key, ApiKey)
    return key


def check_settings(server: Server) -> None:
    """Raises ConfigError if there is a key file and it can't be used."""
    KeyRing(server)


def _api_keys(entries: dict[str, KeyEntry]) -> tuple[ApiKey, ...]:
    return tuple(
        _api_key(name, entry.key, is_admin=entry.admin, max_requests=entry.max_requests)
        for name, entry in entries.items()
    )


def _api_key(name: str, key: str, *, is_admin: bool, max_requests: int | None = None) -> ApiKey:
    identity = hashlib.sha256(_SALT_PREFIX + key.encode()).hexdigest()
    return ApiKey(name, _digest(key.encode()), identity, is_admin, max_requests)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(_KEY_PREFIX + key).digest()
