"""A chat's messages. Ollama has images in a separate field, and calls without ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vlm_server.api.dialects.ollama.schema import ChatMessage
from vlm_server.api.parsing.conversation import Conversation, Counts
from vlm_server.api.parsing.media.external import is_external
from vlm_server.api.parsing.tools import object_text
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import ContentPart, Message, TextPart, ToolCall


def parse_messages(messages: Sequence[ChatMessage], conversation: Conversation) -> None:
    """Add `messages` to `conversation`. Raises RequestError or BytesNeeded."""
    if not any(message.role == "user" for message in messages):
        raise InvalidRequest("At least one message must have the role 'user'.", "messages")
    num_images = sum(len(message.images or ()) for message in messages)
    num_parts = num_images + sum(1 + len(message.tool_calls or ()) for message in messages)
    Counts(len(messages), num_parts, num_images, 0).check(conversation.limits)
    parser = _MessageParser(conversation)
    for i, message in enumerate(messages):
        param = f"messages[{i}]"
        conversation.add(parser.message(message, param), param)
    conversation.check_complete()


def images_and_text(
    images: Sequence[str], images_param: str, text: TextPart, conversation: Conversation
) -> tuple[ContentPart, ...]:
    """Parts with `images`, each base64 or a URL, and the text about them."""
    parts = [_image(image, f"{images_param}[{i}]", conversation) for i, image in enumerate(images)]
    return (*parts, text) if text.text or not parts else tuple(parts)


def _image(image: str, param: str, conversation: Conversation) -> ContentPart:
    """A part with `image`: base64, as Ollama's clients send it, or a URL."""
    if image[:5].lower() == "data:" or is_external(image):
        return conversation.image(image, param)
    return conversation.base64_image(image, param)


@dataclass(slots=True)
class _MessageParser:
    """Converts messages in order. Calls get ids, to which results refer."""

    conversation: Conversation
    _num_calls: int = 0
    _open: list[ToolCall] = field(default_factory=list)
    """Calls of the last turn without a result so far."""

    def message(self, message: ChatMessage, param: str) -> Message:
        match message.role:
            case "assistant":
                return self._assistant(message, param)
            case "tool":
                return self._result(message, param)
            case "user":
                return Message("user", self._content(message, param))
        _refuse_images(message, param)
        return Message("system", self._content(message, param))

    def _assistant(self, message: ChatMessage, param: str) -> Message:
        _refuse_images(message, param)
        content = self._content(message, param)
        self._open = self._calls(message, param)
        return Message(
            role="assistant",
            content=content if message.content or not self._open else (),
            reasoning=self.conversation.count_text(message.thinking or "", f"{param}.thinking"),
            tool_calls=tuple(self._open),
        )

    def _result(self, message: ChatMessage, param: str) -> Message:
        name = message.tool_name or message.name or ""
        call = self._answered_call(message.tool_call_id or "", name)
        names = (message.tool_call_id, message.tool_name, message.name)
        for text in filter(None, names):
            self.conversation.count_text(text, param)
        return Message(
            role="tool",
            content=self._content(message, param),
            tool_call_id=call.id,
            name=call.name,
        )

    def _answered_call(self, call_id: str, name: str) -> ToolCall:
        """The call of a result, found by its id, else by its tool's name, else by its position."""
        for call in self._open:
            if call.id == call_id if call_id else name in ("", call.name):
                self._open.remove(call)
                return call
        return ToolCall(call_id, name, "{}")

    def _calls(self, message: ChatMessage, param: str) -> list[ToolCall]:
        calls = []
        for i, call in enumerate(message.tool_calls or ()):
            self._num_calls += 1
            where = f"{param}.tool_calls[{i}]"
            arguments = object_text(call.function.arguments or "", f"{where}.function.arguments")
            call_id = call.id or f"call_{self._num_calls}"
            for text in (call_id, call.function.name, arguments):
                self.conversation.count_text(text, where)
            calls.append(ToolCall(call_id, call.function.name, arguments))
        return calls

    def _content(self, message: ChatMessage, param: str) -> tuple[ContentPart, ...]:
        text = self.conversation.text(message.content or "", f"{param}.content")
        return images_and_text(message.images or (), f"{param}.images", text, self.conversation)


def _refuse_images(message: ChatMessage, param: str) -> None:
    if message.images:
        text = f"Images are not allowed in messages of role '{message.role}'."
        raise InvalidRequest(text, f"{param}.images")
