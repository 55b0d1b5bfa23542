"""A stored file's record. Its name is its id, or the hash of its bytes."""

from __future__ import annotations

import secrets

import msgspec

MEDIA = "media"
"""The purpose of bytes that have no other name than their hash."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file of `owner`; times are in seconds since 1970."""

    id: str
    owner: str
    sha256: str
    num_bytes: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int | None
    """When the client wants it dropped; None for no such time."""
    used_at: float
    path: str
    """The name of its file in the store's folder."""


def new_id() -> str:
    """An id that no other file has."""
    return f"file-{secrets.token_hex(12)}"
