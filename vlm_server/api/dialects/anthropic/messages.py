"""A request's messages, from Anthropic's blocks to turns as chat templates know them.

Tool results, which are in the user's messages, become separate turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vlm_server.api.dialects.anthropic import schema
from vlm_server.api.dialects.anthropic.citations import CitedDocument, instruction
from vlm_server.api.dialects.fields import check_counts, page_options
from vlm_server.api.parsing.conversation import Conversation, DocumentSource
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.media import documents
from vlm_server.api.parsing.media.external import file_name
from vlm_server.api.parsing.tools import object_text
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import ContentPart, ImagePart, Message, TextPart, ToolCall

BILLING_HEADER = "x-anthropic-billing-header"
"""Prefix of a block that differs in each request and is left out of the system prompt."""

ERROR_MARK = "Error: "
"""Prefix of a failed tool's result."""
_PDF_BASE64 = "JVBERi"
"""The beginning of a PDF in base64."""
_INDEX = re.compile(r"\[[0-9]+\]")


def parse_messages(
    request: schema.MessagesRequest, conversation: Conversation, ignored: IgnoredFields
) -> list[CitedDocument]:
    """Add all messages of `request`, its system prompt first. Raises RequestError.

    Returns the documents whose pages the answer may cite.
    """
    if not any(message.role == "user" for message in request.messages):
        raise InvalidRequest("At least one message must have the role 'user'.", "messages")
    check_counts(
        len(request.messages), _contents(request), conversation.limits, image=schema.ImageBlock
    )
    if system := _system(request, conversation):
        conversation.add(Message("system", system), "system")
    parser = _MessageParser(conversation, ignored)
    for i, message in enumerate(request.messages):
        for turn in parser.turns(message, f"messages[{i}].content"):
            conversation.add(turn, f"messages[{i}]")
    conversation.check_complete()
    return parser.cited


def has_billing_header(request: schema.MessagesRequest) -> bool:
    """Whether the system prompt has a block that is left out."""
    return not isinstance(request.system, str | None) and any(map(_is_billing, request.system))


class _MessageParser:
    """Converts messages in order; results refer to earlier calls."""

    def __init__(self, conversation: Conversation, ignored: IgnoredFields) -> None:
        self._conversation = conversation
        self._ignored = ignored
        self._tools: dict[str, str] = {}
        self._num_documents = 0
        self.cited: list[CitedDocument] = []
        """Documents whose pages the answer may cite."""

    def turns(self, message: schema.InputMessage, param: str) -> Iterator[Message]:
        """The turns of `message`, whose blocks are the field `param`."""
        content = message.content
        if isinstance(content, str):
            yield Message(message.role, (self._conversation.text(content, param),))
            return
        self._conversation.check_content(message.role, content, param)
        named_blocks = [(block, f"{param}[{i}]") for i, block in enumerate(content)]
        match message.role:
            case "assistant":
                yield self._assistant(named_blocks)
            case "user":
                yield from self._user(named_blocks)
            case "system":
                yield Message("system", self._parts(named_blocks, "system"))

    def _assistant(self, blocks: Sequence[tuple[schema.ContentBlock, str]]) -> Message:
        content: list[ContentPart] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for block, param in blocks:
            match block:
                case schema.ThinkingBlock(thinking=text, signature=signature):
                    if signature != schema.SIGNATURE:
                        self._ignore(f"{param}.signature", signature)
                    reasoning.append(self._conversation.count_text(text, param))
                case schema.RedactedThinkingBlock():
                    self._ignored.add("messages[].content[].redacted_thinking")
                case schema.ToolUseBlock():
                    calls.append(self._call(block, param))
                case schema.TextBlock(text=text):
                    content.append(self._conversation.text(text, param))
                case _:
                    raise _misplaced_error(block, "assistant", param)
        return Message("assistant", tuple(content), "\n\n".join(filter(None, reasoning)), (*calls,))

    def _call(self, block: schema.ToolUseBlock, param: str) -> ToolCall:
        arguments = object_text(block.input, f"{param}.input")
        for text in (block.id, block.name, arguments):
            self._conversation.count_text(text, param)
        self._tools[block.id] = block.name
        return ToolCall(block.id, block.name, arguments)

    def _user(self, blocks: Sequence[tuple[schema.ContentBlock, str]]) -> Iterator[Message]:
        parts: list[ContentPart] = []
        for block, param in blocks:
            if not isinstance(block, schema.ToolResultBlock):
                parts += self._parts([(block, param)], "user")
                continue
            if parts:
                yield Message("user", tuple(parts))
                parts = []
            yield self._result(block, param)
        if parts:
            yield Message("user", tuple(parts))

    def _result(self, block: schema.ToolResultBlock, param: str) -> Message:
        content = block.content or ""
        parts: list[ContentPart] = []
        if block.is_error:
            parts.append(TextPart(ERROR_MARK))
        if isinstance(content, str):
            parts.append(self._conversation.text(content, f"{param}.content"))
        else:
            inner = ((block, f"{param}.content[{i}]") for i, block in enumerate(content))
            parts += self._parts(inner, "user")
        call_id = self._conversation.count_text(block.tool_use_id, param)
        name = self._tools.get(call_id, "")
        return Message("tool", tuple(parts), tool_call_id=call_id, name=name)

    def _parts(
        self, blocks: Iterable[tuple[schema.ContentBlock, str]], role: str
    ) -> tuple[ContentPart, ...]:
        parts: list[ContentPart] = []
        for block, param in blocks:
            match block:
                case schema.TextBlock(text=text):
                    parts.append(self._conversation.text(text, param))
                case schema.ImageBlock() if role == "user":
                    parts.append(self._image(block, param))
                case schema.DocumentBlock() if role == "user":
                    parts += self._document(block, param)
                case _:
                    raise _misplaced_error(block, role, param)
        return tuple(parts)

    def _document(self, block: schema.DocumentBlock, param: str) -> Iterator[ContentPart]:
        index, self._num_documents = self._num_documents, self._num_documents + 1
        source = block.source
        if isinstance(source, schema.TextSource | schema.ContentSource):
            yield from self._given_document(block, source, param)
            return
        match source:
            case schema.UrlSource(url=data):
                pass
            case schema.FileSource(file_id=file_id):
                data = file_name(file_id, param)
            case schema.Base64Source(data=data, media_type=given_type):
                is_pdf = data.startswith(_PDF_BASE64)
                if given_type != ("application/pdf" if is_pdf else "image/tiff"):
                    self._ignore(f"{param}.source.media_type", given_type)
        is_base64 = isinstance(source, schema.Base64Source)
        options = page_options(block.pages, block.dpi, block.max_pixels, block.include_text)
        document = DocumentSource(data, block.title or "", block.context or "", is_base64)
        yield from self._conversation.document(document, param, options)
        if block.citations and block.citations.enabled and self._conversation.documents:
            pages = self._conversation.documents[-1]
            self.cited.append(CitedDocument(index, block.title, pages))
            yield self._conversation.text(instruction(index), param)

    def _given_document(
        self,
        block: schema.DocumentBlock,
        source: schema.TextSource | schema.ContentSource,
        param: str,
    ) -> Iterator[ContentPart]:
        """The parts of a document without pages, in which there is nothing to draw or to cite."""
        if block.citations and block.citations.enabled:
            self._ignore(f"{param}.citations.enabled", True)
        for name in ("pages", "dpi", "max_pixels", "include_text"):
            self._ignore(f"{param}.{name}", getattr(block, name))
        if heading := documents.heading(block.title or "", block.context or ""):
            yield self._conversation.text(f"{heading}\n", param)
        if isinstance(source, schema.TextSource):
            yield self._conversation.text(source.data, param)
        elif isinstance(source.content, str):
            yield self._conversation.text(source.content, param)
        else:
            place = f"{param}.source.content"
            inner = ((part, f"{place}[{i}]") for i, part in enumerate(source.content))
            yield from self._parts(inner, "user")

    def _image(self, block: schema.ImageBlock, param: str) -> ImagePart:
        match block.source:
            case schema.UrlSource(url=url):
                return self._conversation.image(url, param)
            case schema.FileSource(file_id=file_id):
                return self._conversation.image(file_name(file_id, param), param)
            case schema.Base64Source(data=data, media_type=given_type):
                part = self._conversation.base64_image(data, param)
                media_type = f"image/{self._conversation.images[part.index].format.lower()}"
                if given_type != media_type:
                    self._ignore(f"{param}.source.media_type", given_type)
                return part

    def _ignore(self, param: str, value: Any) -> None:
        self._ignored.add(_INDEX.sub("[]", param), value)


def _system(request: schema.MessagesRequest, conversation: Conversation) -> tuple[ContentPart, ...]:
    system = request.system or ""
    if isinstance(system, str):
        return (conversation.text(system, "system"),) if system else ()
    return conversation.texts(
        (block.text, f"system[{i}]") for i, block in enumerate(system) if not _is_billing(block)
    )


def _is_billing(block: schema.TextBlock) -> bool:
    return block.text.startswith(BILLING_HEADER)


def _contents(request: schema.MessagesRequest) -> Iterator[str | Sequence[schema.ContentBlock]]:
    """The contents of all messages, and those of tool results and documents that are lists."""
    blocks: list[schema.ContentBlock] = []
    for message in request.messages:
        yield message.content
        blocks += message.content if isinstance(message.content, list) else ()
    for block in blocks:
        if isinstance(block, schema.ToolResultBlock) and isinstance(block.content, list):
            yield block.content
            blocks += (each for each in block.content if isinstance(each, schema.DocumentBlock))
        elif isinstance(block, schema.DocumentBlock) and isinstance(
            block.source, schema.ContentSource
        ):
            yield block.source.content


def _misplaced_error(block: schema.ContentBlock, role: str, param: str) -> InvalidRequest:
    kind = block.__struct_config__.tag
    return InvalidRequest(f"Blocks of type `{kind}` are not allowed in `{role}` messages.", param)
