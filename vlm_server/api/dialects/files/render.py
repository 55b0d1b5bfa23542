"""The JSON of files in OpenAI's and in Anthropic's dialect."""

from __future__ import annotations

import mimetypes
from datetime import UTC, datetime

from vlm_server.api.dialects.pages import Json
from vlm_server.api.files.index import StoredFile

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


def file_object(file: StoredFile, *, is_anthropics: bool) -> Json:
    return anthropic_file(file) if is_anthropics else openai_file(file)


def deleted(file: StoredFile, *, is_anthropics: bool) -> Json:
    """What is said of a file that was deleted."""
    if is_anthropics:
        return {"id": file.id, "type": "file_deleted"}
    return {"id": file.id, "object": "file", "deleted": True}


def media(file: StoredFile) -> Json:
    """What is known of bytes by their hash, which is the id."""
    return {"id": f"sha256:{file.sha256}", "object": "media", "bytes": file.num_bytes}
