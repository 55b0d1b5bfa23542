"""API keys, accepted or not, and their rights. Hashes of the keys are kept, never the keys."""

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
from vlm_server.settings.paths import expand_home

CHECK_SECONDS = 1.0
"""The shortest time between two checks of the key file, which requests cause."""

_SCOPE_KEY = "vlm_server.api_key"
_KEY_PREFIX = b"vlm_server API key\0"
_SALT_PREFIX = b"vlm_server cache salt\0"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An accepted key: its hash, its name in the log, and its rights."""

    name: str
    digest: bytes
    identity: str
    """A hash that survives restarts: the owner of stored responses and the salt of cache entries.
    A name would not do: it may be given to another key later."""
    is_admin: bool
    max_requests: int | None = None
    """The limit on requests in flight; None is no limit."""


NO_KEY = ApiKey("", b"", "", is_admin=True)
"""The key where none is required: only this machine can connect, as one client."""


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
            self._file = WatchedKeyFile(expand_home(server.api_key_file))
            self._of_file = _api_keys(self._file.read())
        self.needs_key = server.needs_key

    def find(self, key_text: bytes) -> ApiKey | None:
        """The accepted key that equals `key_text`, or None. Compares in constant time."""
        self._refresh()
        digest, api_key = _digest(key_text), None
        for key in (*self._of_file, *self._own):
            if hmac.compare_digest(digest, key.digest):
                api_key = key
        return api_key

    def of_identity(self, identity: str) -> ApiKey | None:
        """The accepted key of this identity, or None: it has been removed."""
        if not self.needs_key:
            return NO_KEY if identity == NO_KEY.identity else None
        self._refresh()
        keys = (key for key in (*self._of_file, *self._own) if key.identity == identity)
        return next(keys, None)

    def _refresh(self) -> None:
        now = self._clock()
        if self._file is None or now < self._check_at:
            return
        self._check_at = now + CHECK_SECONDS
        entries = self._file.read_if_changed()
        if entries is not None:
            self._of_file = _api_keys(entries)


class KeySlots:
    """The number of requests in flight by name of API key."""

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
    """Set the API key of the request of `scope`."""
    scope[_SCOPE_KEY] = key


def key_of(scope: Scope) -> ApiKey:
    """The key that `attach` set."""
    key = scope[_SCOPE_KEY]
    assert isinstance(key, ApiKey)
    return key


def owner_of(scope: Scope) -> str:
    """The owner of what the request of `scope` stores: the identity of its key."""
    return key_of(scope).identity


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
