"""The routes of uploaded files. Each client sees its own files alone."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from vlm_server.api.dialects import pages
from vlm_server.api.dialects.files.receive import Uploads
from vlm_server.api.dialects.files.schema import AnthropicForm, parse
from vlm_server.api.dialects.pages import Json
from vlm_server.api.files.index import StoredFile
from vlm_server.api.files.store import FileStore
from vlm_server.api.http import access_log
from vlm_server.api.http.access import keys
from vlm_server.api.http.answer import json_response
from vlm_server.api.http.connection.exchange import wait_until_read
from vlm_server.api.http.dialect import is_anthropics
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.media.external import HASH_PREFIX
from vlm_server.errors import InvalidRequest, NotFound
from vlm_server.settings import Settings

PATH, MEDIA_PATH = "/v1/files", "/v1/media"
_DOWNLOAD_HEADERS = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
"""A file is never shown as a page of this server's origin."""
_PIECE_BYTES = 256 << 10


class Files:
    """`/v1/files`, in OpenAI's dialect, or in Anthropic's if its header says so."""

    def __init__(self, store: FileStore, uploads: Uploads, settings: Settings) -> None:
        self._store = store
        self._uploads = uploads
        self._refuses = settings.server.unknown_fields == "refuse"

    async def create(self, request: Request) -> Response:
        is_theirs = is_anthropics(request.headers)
        async with self._uploads.form(request) as (form, upload):
            purpose, seconds = "user_data", None
            ignored, filename = IgnoredFields(), form.filename or ""
            if is_theirs:
                ignored.add_unread(form.fields, AnthropicForm(filename))
            else:
                fields = parse(form.fields, filename, ignored, refuses=self._refuses)
                purpose, seconds = fields.purpose, fields.seconds
            access_log.entry_of(request.scope).ignored = ignored.names
            add = partial(self._store.add, expires_after_seconds=seconds)
            file = await self._uploads.run(
                add, keys.owner_of(request.scope), upload, filename, purpose
            )
        return json_response(file_object(file, is_anthropics=is_theirs))

    async def list(self, request: Request) -> Response:
        page = _anthropic_page if is_anthropics(request.headers) else _openai_page
        return json_response(await self._uploads.run(page, self._store, request))

    async def retrieve(self, request: Request) -> Response:
        file, is_theirs = await self._find(request), is_anthropics(request.headers)
        return json_response(file_object(file, is_anthropics=is_theirs))

    async def content(self, request: Request) -> Response:
        return await download(await self._find(request), self._store, self._uploads, request)

    async def delete(self, request: Request) -> Response:
        file = await self._find(request)
        await self._uploads.run(self._store.delete, file)
        return json_response(deleted(file, is_anthropics=is_anthropics(request.headers)))

    async def _find(self, request: Request) -> StoredFile:
        file_id = request.path_params["file_id"]
        if file_id.startswith(HASH_PREFIX):
            raise NotFound(f"A hash is no id: see `{MEDIA_PATH}/{{name}}`.")
        return await find(file_id, self._store, self._uploads, request)


class Media:
    """`/v1/media`: bytes under their hash, for clients that send them once."""

    def __init__(self, store: FileStore, uploads: Uploads) -> None:
        self._store = store
        self._uploads = uploads

    async def put(self, request: Request) -> Response:
        async with self._uploads.raw(request) as upload:
            if not upload.num_bytes:
                raise InvalidRequest("The body is empty.")
            file = await self._uploads.run(
                self._store.add_media, keys.owner_of(request.scope), upload
            )
        return json_response(media(file))

    async def retrieve(self, request: Request) -> Response:
        return await download(await self._find(request), self._store, self._uploads, request)

    async def _find(self, request: Request) -> StoredFile:
        name = request.path_params["name"]
        if not name.startswith(HASH_PREFIX):
            raise InvalidRequest(f"The name must begin with `{HASH_PREFIX}`.", "name")
        return await find(name, self._store, self._uploads, request)


async def find(name: str, store: FileStore, uploads: Uploads, request: Request) -> StoredFile:
    """The client's file of that id or hash. Raises NotFound."""
    file = await uploads.run(store.find, keys.owner_of(request.scope), name)
    if file is None:
        raise NotFound("There is no such file: upload it first, with this API key.")
    return file


async def download(
    file: StoredFile, store: FileStore, uploads: Uploads, request: Request
) -> Response:
    """The bytes of `file`, as fast as the client reads them. Raises NotFound."""
    headers = {**_DOWNLOAD_HEADERS, "Content-Length": str(file.num_bytes)}
    if request.method == "HEAD":
        return Response(headers=headers, media_type=BYTES_TYPE)
    reader = await uploads.run(store.open, file)
    if reader is None:
        raise NotFound("There is no such file: it has just been deleted.")

    async def pieces() -> AsyncIterator[bytes]:
        with reader:
            while piece := await uploads.run(reader.read, _PIECE_BYTES):
                yield piece
                await wait_until_read(request.scope)

    return StreamingResponse(pieces(), headers=headers, media_type=BYTES_TYPE)


# ---- pages of a list -------------------------------------------------------------------------


def _openai_page(store: FileStore, request: Request) -> pages.Json:
    query, owner = request.query_params, keys.owner_of(request.scope)
    newest_first, limit = pages.is_descending(query), pages.limit_of(query, 10_000, 10_000)
    files = store.page(
        owner,
        purpose=query.get("purpose"),
        after=_known(query, "after", store, owner),
        limit=limit + 1,
        newest_first=newest_first,
    )
    return pages.page(files, limit, openai_file, object="list")


def _anthropic_page(store: FileStore, request: Request) -> pages.Json:
    """A page, the newest file first; before `before_id` are the files that are newer."""
    query, owner = request.query_params, keys.owner_of(request.scope)
    before = _known(query, "before_id", store, owner)
    after = _known(query, "after_id", store, owner)
    pages.check_exclusive(before, after)
    limit = pages.limit_of(query, 20, 1000)
    files = store.page(owner, after=before or after, limit=limit + 1, newest_first=not before)
    return pages.page(files, limit, anthropic_file, is_reversed=bool(before))


def _known(query: Mapping[str, str], name: str, store: FileStore, owner: str) -> str | None:
    """The id of a file in the query's parameter `name`, if any."""
    file_id = query.get(name)
    if file_id is not None and store.find(owner, file_id) is None:
        raise InvalidRequest(f"`{name}` is the id of none of the files.", name)
    return file_id


# ---- JSON of uploads ---------------------------------------------------------------------


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
