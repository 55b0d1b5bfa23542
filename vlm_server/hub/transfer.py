"""One file of the hub into its cache: resumed where it stopped, verified, then put in its place.

`huggingface_hub` begins a file anew after its process was killed, and does not compare hashes. So
a file grows here as `<etag>.incomplete`, the name that the cache's own tools know, and becomes a
blob when its bytes have the hash that the hub's tree has for it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

_BLOCK_BYTES = 1 << 20
_TRIES = 2
"""A file whose hash is wrong is fetched again, once, from its beginning."""


class WrongContent(Exception):
    """What came is not what the hub says it has; the message names the file."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file to be had. `digest` is `sha256:...` of its bytes, or the `git:...` name of its blob.

    Both are in hex, and git's is the SHA-1 of `blob SIZE`, a zero byte and the bytes.
    """

    path: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """The hub's ETag of the file, which its blob in the cache is named by."""
        return self.digest.partition(":")[2]


def blob_path(repository: Path, file: HubFile) -> Path:
    return repository / "blobs" / file.name


def snapshot_path(repository: Path, commit: str, file: HubFile) -> Path:
    return repository / "snapshots" / commit / file.path


def held_bytes(repository: Path, commit: str, file: HubFile) -> int:
    """How much of `file` is in the cache."""
    blob = blob_path(repository, file)
    for path in (snapshot_path(repository, commit, file), blob, _partial(blob)):
        try:
            return min(path.stat().st_size, file.size)
        except OSError:
            continue
    return 0


def transfer(repository: Path, repo: str, commit: str, file: HubFile) -> Path:
    """Fetch `file` of a repository at `commit`, unless it is here. Returns where it is.

    `repository` is the repository's folder in the cache. Raises WrongContent, and the errors of
    `huggingface_hub`, httpx and the disk.
    """
    blob = blob_path(repository, file)
    for path in (snapshot_path(repository, commit, file), blob):
        if path.exists():
            return path
    url = hf_hub_url(repo, file.path, revision=commit)
    served = get_hf_file_metadata(url, retry_on_errors=True)
    if served.commit_hash != commit or served.etag != file.name:
        raise WrongContent(
            f"{file.path}: the hub serves another version ({served.commit_hash}, "
            f"{served.etag}) than the one that was asked for ({commit}, {file.name})"
        )
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(blob)
    for _ in range(_TRIES):
        _fetch(url, partial, file)
        if _digest(partial, file) == file.digest:
            os.replace(partial, blob)
            return blob
        partial.unlink()
    raise WrongContent(f"{file.path} has not the hash that the hub gives for it ({file.digest})")


def _fetch(url: str, partial: Path, file: HubFile) -> None:
    """Append to `partial` what is missing.

    The URL is the hub's own: where it leads to is asked for anew at each try, as that expires.
    """
    if partial.exists() and partial.stat().st_size > file.size:
        partial.unlink()
    with partial.open("ab") as out:
        http_get(
            url,
            out,
            resume_size=out.tell(),
            headers=build_hf_headers(),
            expected_size=file.size,
            displayed_filename=file.path,
        )


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _digest(path: Path, file: HubFile) -> str:
    kind = file.digest.partition(":")[0]
    digest = hashlib.sha256()
    if kind == "git":
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)
    return f"{kind}:{digest.hexdigest()}"
