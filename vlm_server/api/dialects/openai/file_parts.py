"""Parts of type `file`: documents, and uploaded files of any kind."""

from __future__ import annotations

from collections.abc import Iterable

from vlm_server.api.dialects.fields import document_source, page_options
from vlm_server.api.dialects.openai import schema
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import ContentPart


def file_parts(
    file: schema.File, param: str, conversation: Conversation
) -> tuple[ContentPart, ...]:
    """The parts that the engine gets for `file`, which is at `param`. Raises RequestError."""
    if (file.file_data is None) == (file.file_id is None):
        place = f"{param}.file.file_data"
        raise InvalidRequest(f"`{param}.file` needs either `file_data` or `file_id`.", place)
    options = page_options(file.pages, file.dpi, file.max_pixels, file.include_text)
    if file.file_id is not None:
        return conversation.file(file.file_id, param, options, file.filename or "")
    source = document_source(file.file_data or "", file.filename)
    return conversation.document(source, param, options)


def num_documents(contents: Iterable[object]) -> int:
    """The parts in `contents` that are documents for certain, and so no images."""
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sum(
        isinstance(part, schema.FilePart) and part.file.file_data is not None for part in parts
    )
