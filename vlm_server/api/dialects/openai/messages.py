"""A chat's messages as the conversation that the engine gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vlm_server.api.dialects.fields import check_counts, document_source, page_options
from vlm_server.api.dialects.openai import schema
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.tools import object_text
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import ContentPart, Message, ToolCall

_IMAGE_ROLES = ("user", "tool")


def parse_messages(
    messages: list[schema.ChatMessage], conversation: Conversation, ignored: IgnoredFields
) -> None:
    """Fill `conversation`. Raises RequestError and BytesNeeded."""
    if not any(message.role == "user" for message in messages):
        raise InvalidRequest("At least one message must have the role 'user'.", "messages")
    check_counts(
        len(messages),
        (message.content for message in messages),
        conversation.limits,
        image=(schema.ImageUrlPart, schema.FilePart),
        num_documents=num_documents(message.content for message in messages),
        video=schema.VIDEO_PARTS,
    )
    parser = _MessageParser(conversation, ignored)
    for i, message in enumerate(messages):
        param = f"messages[{i}]"
        conversation.add(parser.message(message, param), param)
    conversation.check_complete()


@dataclass(slots=True)
class _MessageParser:
    """Converts messages in order; results refer to earlier calls."""

    conversation: Conversation
    ignored: IgnoredFields
    called: dict[str, str] = field(default_factory=dict)
    """The names of tools by the ids of their calls."""

    def message(self, message: schema.ChatMessage, param: str) -> Message:
        match message.role:
            case "assistant":
                return self._assistant(message, param)
            case "tool":
                return self._result(message, param)
            case "developer":
                role = "system"
            case role:
                pass
        self._ignore(message, "name", "refusal", *_OF_ASSISTANTS, "tool_call_id")
        if message.content is None:
            raise InvalidRequest(f"`{param}.content` is missing.", f"{param}.content")
        content = self._content(message, param)
        self.conversation.check_content(role, content, f"{param}.content")
        return Message("user" if role == "user" else "system", content)

    def _assistant(self, message: schema.ChatMessage, param: str) -> Message:
        self._ignore(message, "name", "tool_call_id")
        count_text = self.conversation.count_text
        content = self._content(message, param)
        if message.refusal:
            content += (self.conversation.text(message.refusal, f"{param}.refusal"),)
        reasoning = message.reasoning_content or message.reasoning or ""
        if message.reasoning != reasoning:
            self._ignore(message, "reasoning")
        calls = (
            self._call(call, f"{param}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls or ())
        )
        return Message(
            "assistant",
            content,
            reasoning=count_text(reasoning, f"{param}.reasoning_content"),
            tool_calls=tuple(calls),
        )

    def _call(self, call: schema.ToolCall, param: str) -> ToolCall:
        count_text, function = self.conversation.count_text, call.function
        arguments = object_text(function.arguments or "", f"{param}.function.arguments")
        self.called[count_text(call.id, f"{param}.id")] = function.name
        return ToolCall(
            id=call.id,
            name=count_text(function.name, f"{param}.function.name"),
            arguments=count_text(arguments, f"{param}.function.arguments"),
        )

    def _result(self, message: schema.ChatMessage, param: str) -> Message:
        self._ignore(message, "refusal", *_OF_ASSISTANTS)
        call_id, param_of_id = message.tool_call_id, f"{param}.tool_call_id"
        if call_id is None:
            raise InvalidRequest(f"`{param_of_id}` is missing.", param_of_id)
        name = message.name or self.called.get(call_id, "")  # agents drop old turns
        return Message(
            "tool",
            self._content(message, param),
            tool_call_id=self.conversation.count_text(call_id, param_of_id),
            name=self.conversation.count_text(name, f"{param}.name"),
        )

    def _content(self, message: schema.ChatMessage, param: str) -> tuple[ContentPart, ...]:
        if message.content is None:
            return ()
        if isinstance(message.content, str):
            return (self.conversation.text(message.content, f"{param}.content"),)
        parts: list[ContentPart] = []
        for i, part in enumerate(message.content):
            place = f"{param}.content[{i}]"
            if isinstance(part, schema.FilePart):
                parts += self._file(part.file, message.role, place)
            else:
                parts.append(self._part(part, message.role, place))
        return tuple(parts)

    def _file(self, file: schema.File, role: str, param: str) -> tuple[ContentPart, ...]:
        if role not in _IMAGE_ROLES:
            raise InvalidRequest(f"Files are not allowed in messages of role '{role}'.", param)
        return file_parts(file, param, self.conversation)

    def _part(self, part: schema.MediaPart, role: str, param: str) -> ContentPart:
        match part:
            case schema.ImageUrlPart(image_url=url) if role in _IMAGE_ROLES:
                data, detail = (url, None) if isinstance(url, str) else (url.url, url.detail)
                return self.conversation.image(data, param, detail)
            case schema.VideoUrlPart() | schema.VideoPart() if role == "user":
                fields = schema.video_fields(part, param)
                return self.conversation.video(part.url, param, fields)
            case schema.ImageUrlPart() | schema.VideoUrlPart() | schema.VideoPart():
                kind = "Images" if isinstance(part, schema.ImageUrlPart) else "Videos"
                raise InvalidRequest(f"{kind} are not allowed in messages of role '{role}'.", param)
            case schema.RefusalPart():
                return self.conversation.text(part.refusal, param)
            case _:
                return self.conversation.text(part.text, param)

    def _ignore(self, message: schema.ChatMessage, *names: str) -> None:
        """Report fields without meaning in messages of this role."""
        for name in names:
            self.ignored.add(f"messages[].{name}", getattr(message, name))


_OF_ASSISTANTS = ("reasoning_content", "reasoning", "tool_calls")


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
