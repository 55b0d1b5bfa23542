"""The download of one file into the hub's cache: resumed, verified, then renamed.

`huggingface_hub` starts a file anew after its process was killed, and compares no hashes. So a file
grows here as `<etag>.incomplete`, the name that the cache's own tools know, and becomes a blob once
its bytes have the hash that the hub's tree has for it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

_TRIES = 2
"""A file with a wrong hash is downloaded once more, from its beginning."""


class WrongContent(Exception):
    """The bytes are not what the hub says it has; the message names the file."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `digest` is `sha256:...` of its bytes, or its git blob id `git:...`.

    Both are in hex; git's is the SHA-1 of `blob SIZE`, a zero byte and the bytes.
    """

    path: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """The hub's ETag, which names the file's blob in the cache."""
        return self.digest.partition(":")[2]


def blob_path(repository: Path, file: HubFile) -> Path:
    return repository / "blobs" / file.name


def snapshot_path(repository: Path, commit: str, file: HubFile) -> Path:
    return repository / "snapshots" / commit / file.path


def held_bytes(repository: Path, commit: str, file: HubFile) -> int:
    """How many bytes of `file` are in the cache."""
    blob = blob_path(repository, file)
    for path in (snapshot_path(repository, commit, file), blob, _partial(blob)):
        try:
            return min(path.stat().st_size, file.size)
        except OSError:
            continue
    return 0


def download_file(repository: Path, repo: str, commit: str, file: HubFile) -> Path:
    """The path of `file` at `commit` in the cache, downloaded unless it is there already.

    `repository` is the folder of `repo` in the cache. Raises WrongContent, and the errors of
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
        _append_missing(url, partial, file)
        if _digest(partial, file) == file.digest:
            os.replace(partial, blob)
            return blob
        partial.unlink()
    raise WrongContent(f"{file.path} has not the hash that the hub gives for it ({file.digest})")


def _append_missing(url: str, partial: Path, file: HubFile) -> None:
    """`url` is the hub's own, never where it redirects to: that expires between two tries."""
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
    with path.open("rb") as content:
        if kind == "git":
            digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
            return f"{kind}:{hashlib.file_digest(content, lambda: digest).hexdigest()}"
        return f"{kind}:{hashlib.file_digest(content, 'sha256').hexdigest()}"
