"""Items as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from vlm_server.api.dialects.fields import document_source, page_options
from vlm_server.api.dialects.responses import items
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.media.external import file_name
from vlm_server.api.parsing.media.video_options import fields_of
from vlm_server.api.parsing.tools import object_text
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import ContentPart, Message, ToolCall

_Part = items.InputText | items.OutputText | items.Refusal | items.InputImage | items.InputVideo


@dataclass(slots=True)
class _AssistantTurn:
    """The assistant's items of one message: reasoning, then text, then calls."""

    reasoning: str = ""
    content: tuple[ContentPart, ...] | None = None
    calls: list[ToolCall] = field(default_factory=list)
    param: str = ""
    """The field of the first item."""


class MessageBuilder:
    """Converts items to messages, in order. Its methods raise RequestError."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._turn = _AssistantTurn()
        self._tools: dict[str, str] = {}
        """The names of the tools, by the ids of their calls."""

    def instruct(self, text: str) -> None:
        """Begin with `text` as a system message."""
        part = self._conversation.text(text, "instructions")
        self._conversation.add(Message("system", (part,)), "instructions")

    def add(self, input_items: Iterable[items.Item], param: str) -> None:
        """Add `input_items`, from the field `param`."""
        for i, item in enumerate(input_items):
            self._add(item, f"{param}[{i}]")

    def messages(self) -> list[Message]:
        """All messages so far."""
        self._end_turn()
        return self._conversation.messages

    def _add(self, item: items.Item, param: str) -> None:
        match item:
            case items.ReasoningItem():
                self._add_reasoning(item, param)
            case items.FunctionCall():
                self._begin(param).calls.append(self._call(item, param))
            case items.MessageItem(role="assistant"):
                if self._turn.content is not None or self._turn.calls:
                    self._end_turn()
                content = self._content(item.content, "assistant", f"{param}.content")
                self._begin(param).content = content
            case items.MessageItem():
                self._end_turn()
                role: Literal["user", "system"] = "user" if item.role == "user" else "system"
                content = self._content(item.content, role, f"{param}.content")
                self._conversation.check_content(role, content, f"{param}.content")
                self._conversation.add(Message(role, content), param)
            case items.FunctionCallOutput():
                self._end_turn()
                self._conversation.add(self._result(item, param), param)

    def _add_reasoning(self, item: items.ReasoningItem, param: str) -> None:
        if self._turn.content is not None or self._turn.calls:
            self._end_turn()
        text = "".join(part.text for part in item.content or ())
        self._begin(param).reasoning += self._conversation.count_text(text, f"{param}.content")

    def _call(self, item: items.FunctionCall, param: str) -> ToolCall:
        for text, name in ((item.call_id, "call_id"), (item.name, "name")):
            self._conversation.count_text(text, f"{param}.{name}")
        self._tools[item.call_id] = item.name
        arguments = object_text(item.arguments, f"{param}.arguments")
        self._conversation.count_text(arguments, f"{param}.arguments")
        return ToolCall(item.call_id, item.name, arguments)

    def _result(self, item: items.FunctionCallOutput, param: str) -> Message:
        self._conversation.count_text(item.call_id, f"{param}.call_id")
        return Message(
            "tool",
            self._content(item.output, "tool", f"{param}.output"),
            tool_call_id=item.call_id,
            name=self._tools.get(item.call_id, ""),
        )

    def _content(
        self, content: str | list[items.MessagePart] | list[items.ToolPart], role: str, param: str
    ) -> tuple[ContentPart, ...]:
        if isinstance(content, str):
            return (self._conversation.text(content, param),)
        parts: list[ContentPart] = []
        for i, part in enumerate(content):
            if isinstance(part, items.InputFile):
                parts += self._pages(part, role, f"{param}[{i}]")
            else:
                parts.append(self._part(part, role, f"{param}[{i}]"))
        return tuple(parts)

    def _pages(self, file: items.InputFile, role: str, param: str) -> tuple[ContentPart, ...]:
        """Parts with the pages of a document."""
        if role not in ("user", "tool"):
            raise InvalidRequest(f"Files are not allowed in items of role '{role}'.", param)
        given = [data for data in (file.file_data, file.file_url, file.file_id) if data is not None]
        if len(given) != 1:
            message = f"`{param}` needs either `file_data`, `file_url` or `file_id`."
            raise InvalidRequest(message, param)
        options = page_options(
            file.pages, file.dpi, file.max_pixels, file.include_text, file.detail
        )
        if file.file_id is not None:
            return self._conversation.file(file.file_id, param, options, file.filename or "")
        source = document_source(given[0], file.filename)
        if file.file_url is not None:
            source = source._replace(is_base64=False)
        return self._conversation.document(source, param, options)

    def _part(self, part: _Part, role: str, param: str) -> ContentPart:
        match part:
            case items.InputImage() if role in ("user", "tool"):
                return self._conversation.image(_image_url(part, param), param, part.detail)
            case items.InputVideo() if role == "user":
                fields = fields_of((param, part))
                return self._conversation.video(part.video_url, param, fields)
            case items.InputImage() | items.InputVideo():
                kind = _KINDS[type(part)]
                raise InvalidRequest(f"{kind} are not allowed in items of role '{role}'.", param)
            case _:
                return self._conversation.text(part.text, param)

    def _begin(self, param: str) -> _AssistantTurn:
        """The assistant's turn in progress, begun here if necessary with the item `param`."""
        self._turn.param = self._turn.param or param
        return self._turn

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, _AssistantTurn()
        if turn.reasoning or turn.content is not None or turn.calls:
            calls = tuple(turn.calls)
            message = Message("assistant", turn.content or (), turn.reasoning, calls)
            self._conversation.add(message, turn.param)


def _image_url(part: items.InputImage, param: str) -> str:
    """The URL of an image, or the name of its file. Raises InvalidRequest and FileNotStored."""
    if (part.image_url is None) == (part.file_id is None):
        raise InvalidRequest(
            f"`{param}` needs either an `image_url` or a `file_id`.", f"{param}.image_url"
        )
    return file_name(part.file_id or "", param) if part.image_url is None else part.image_url


_KINDS = {items.InputImage: "Images", items.InputVideo: "Videos", items.InputFile: "Files"}
