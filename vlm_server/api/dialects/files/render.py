"""The JSON of files in OpenAI's and in Anthropic's dialect."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from vlm_server.api.files.stored_file import StoredFile

Json = dict[str, Any]
BYTES_TYPE = "application/octet-stream"


def openai_file(file: StoredFile) -> Json:
    """OpenAI's object of a file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def anthropic_file(file: StoredFile) -> Json:
    """Anthropic's metadata of a file. All files may be downloaded."""
    created_at = datetime.fromtimestamp(file.created_at, UTC)
    return {
        "id": file.id,
        "type": "file",
        "filename": file.filename,
        "mime_type": mimetypes.guess_type(file.filename)[0] or BYTES_TYPE,
        "size_bytes": file.num_bytes,
        "created_at": created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "downloadable": True,
    }


def openai_deleted(file: StoredFile) -> Json:
    return {"id": file.id, "object": "file", "deleted": True}


def anthropic_deleted(file: StoredFile) -> Json:
    return {"id": file.id, "type": "file_deleted"}


def media(file: StoredFile) -> Json:
    """What is known of bytes by their hash, which is the id."""
    return {"id": f"sha256:{file.sha256}", "object": "media", "bytes": file.num_bytes}


def page(
    files: Sequence[StoredFile], limit: int, render: Callable[[StoredFile], Json], **fields: str
) -> Json:
    """A list of at most `limit` files; there are more if `files` has more. `fields` come first."""
    shown = files[:limit]
    return {
        **fields,
        "data": [render(file) for file in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(files) > limit,
    }
