"""The items of a conversation, from a request's `input` or stored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct, field

from vlm_server.api.dialects.fields import Dpi, ImageDetail, PageList, Size
from vlm_server.api.parsing.media.documents import Detail
from vlm_server.api.parsing.media.video_options import VideoOptions
from vlm_server.errors import NotFound, UnsupportedField

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = field(default_factory=list)


class Refusal(Struct, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class InputImage(Struct, tag_field="type", tag="input_image", omit_defaults=True):
    """An image by its URL, or an uploaded one."""

    image_url: str | None = None
    detail: ImageDetail | None = None
    file_id: str | None = None


class InputVideo(VideoOptions, tag_field="type", tag="input_video", kw_only=True):
    """A video, our extension: its URL, or those of its frames."""

    video_url: str | list[str]


class InputFile(Struct, tag_field="type", tag="input_file", omit_defaults=True):
    """A document, or with `file_id` an uploaded image, video or document.

    file_data: a URL, or base64. file_id: its id, or `sha256:` and the hash of its bytes. The
    fields from `pages` on are our extension.
    """

    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Detail | None = None
    file_id: str | None = None
    pages: PageList | None = None
    dpi: Dpi | None = None
    max_pixels: Size | None = None
    include_text: bool | None = None


MessagePart = InputText | OutputText | Refusal | InputImage | InputVideo | InputFile
ToolPart = InputText | InputImage | InputFile


class MessageItem(Struct, tag_field="type", tag="message", omit_defaults=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[MessagePart]
    id: str | None = None
    status: ItemStatus | None = None
    phase: str | None = None
    """OpenAI's phase of the message, kept and shown without effect."""


class FunctionCall(Struct, tag_field="type", tag="function_call", omit_defaults=True):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None


class FunctionCallOutput(Struct, tag_field="type", tag="function_call_output", omit_defaults=True):
    call_id: str
    output: str | list[ToolPart]
    id: str | None = None
    status: ItemStatus | None = None


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Struct, tag_field="type", tag="reasoning", omit_defaults=True):
    """Reasoning; OpenAI's own, without `content`, has no effect."""

    content: list[ReasoningText] | None = None
    id: str | None = None
    status: ItemStatus | None = None
    summary: list[Any] | None = []


class ItemReference(Struct, tag_field="type", tag="item_reference"):
    """A reference to a stored item, of a response or of its input."""

    id: str


Item = MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem
InputItem = Item | ItemReference
_ID_PREFIXES = {
    MessageItem: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    ReasoningItem: "rs",
}
_INPUT_MARK = "i"
"""Distinguishes ids of input items from ids of the response's items: both count from 0."""

UNSUPPORTED_ITEMS = frozenset(
    {
        *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction"),
        *("computer_call", "computer_call_output", "custom_tool_call", "custom_tool_call_output"),
        *("file_search_call", "image_generation_call", "local_shell_call"),
        *("local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
        *("mcp_list_tools", "shell_call", "shell_call_output", "web_search_call"),
    }
)
"""OpenAI's items that are refused by name."""
PART_TYPES = (
    "'input_text', 'input_image', 'input_file' or 'input_video'; the assistant's 'output_text' or "
    "'refusal'"
)
UNSUPPORTED_PARTS = frozenset({"input_audio"})
"""OpenAI's parts of content that are refused by name."""


_ID = re.compile(r"(?:msg|fc|fco|rs)_(?P<request_hex>[0-9a-f]{32})i?[0-9a-f]{4,}")


def request_hex_of(item_id: str) -> str | None:
    """The hex digits of the response with an item; None for a client's own id."""
    match = _ID.fullmatch(item_id)
    return match and match["request_hex"]


def resolve(input_items: Iterable[InputItem], stored_items: Iterable[Item]) -> list[Item]:
    """The items of a request, with references replaced by their items: stored ones, or the
    request's own. Raises NotFound.
    """
    items = list(input_items)
    own_items = (item for item in items if not isinstance(item, ItemReference))
    by_id = {item.id: item for item in (*stored_items, *own_items)}
    resolved_items = list[Item]()
    for i, item in enumerate(items):
        referenced = by_id.get(item.id) if isinstance(item, ItemReference) else item
        if referenced is None:
            raise NotFound(
                f"`input[{i}]`: there is no such item: it was not stored, or deleted, or dropped "
                "since (`server.responses_keep_seconds` and `server.max_responses_bytes`). Send "
                "the item itself.",
                f"input[{i}]",
            )
        resolved_items.append(referenced)
    return resolved_items


def parts_of(items: Iterable[Item]) -> Iterator[MessagePart]:
    """The parts of all contents that are lists."""
    for item in items:
        content = content_of(item)
        if isinstance(content, list):
            yield from content


def num_documents(contents: Iterable[object]) -> int:
    """The files in `contents` that are documents for certain, and so no images."""
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sum(isinstance(part, InputFile) and part.file_id is None for part in parts)


def is_unfinished(item: Item) -> bool:
    """Whether the answer continues `item`, the last one of the request."""
    is_answer = isinstance(item, MessageItem) and item.role == "assistant"
    return is_answer and item.status in ("in_progress", "incomplete")


def content_of(item: Item) -> str | list[MessagePart] | list[ToolPart] | None:
    """The content of a message or of a call's output; None for other items."""
    match item:
        case MessageItem():
            return item.content
        case FunctionCallOutput():
            return item.output
    return None


def add_types(fields: Any) -> None:
    """Set the types that clients may omit in a list of items.

    Raises UnsupportedField for OpenAI's items and parts that this server does not support.
    """
    if not isinstance(fields, list):
        return
    for i, item in enumerate(fields):
        if not isinstance(item, dict):
            continue
        if item.get("type") is None:
            item["type"] = "message" if "role" in item else "item_reference"
        _refuse(item, UNSUPPORTED_ITEMS, f"input[{i}]", "is not supported")
        for name in ("content", "output"):
            parts = item.get(name)
            for k, part in enumerate(parts if isinstance(parts, list) else ()):
                why = f"is not supported: the type must be {PART_TYPES}"
                _refuse(part, UNSUPPORTED_PARTS, f"input[{i}].{name}[{k}]", why)


def _refuse(value: Any, names: frozenset[str], param: str, why: str) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in names:
        raise UnsupportedField(f"`{param}`: `{kind}` {why}.", param)


def normalize(items: Iterable[Item], request_hex: str) -> list[Item]:
    """`items` as they are stored and shown: each with an id, and its content as a list.

    The ids are unique, also among the items of the response.
    """
    normalized = list(items)
    ids = set[str]()
    for i, item in enumerate(normalized):
        if not item.id or item.id in ids:
            item.id = f"{_ID_PREFIXES[type(item)]}_{request_hex}{_INPUT_MARK}{i:04x}"
        ids.add(item.id)
        item.status = item.status or "completed"
        if isinstance(item, ReasoningItem):
            item.summary = item.summary or []
        if isinstance(item, MessageItem) and isinstance(item.content, str):
            is_answer = item.role == "assistant"
            item.content = [OutputText(item.content) if is_answer else InputText(item.content)]
    for part in parts_of(normalized):
        match part:
            case InputImage():
                part.detail = part.detail or "auto"
            case OutputText():
                part.annotations = part.annotations or []
    return normalized
