"""The input of a chat template: a conversation, tools, and variables of the template's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from vlm_server.errors import InvalidRequest
from vlm_server.protocol import ContentPart, Message, Submit, TemplateOptions, TextPart

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables that the request itself sets."""
_STRUCTURE = frozenset({
    "type", "function", "name", "description", "parameters", "properties", "required", "items",
    "object", "array", "string", "number", "integer", "boolean", "null", "enum", "const", "anyOf",
    "oneOf", "allOf", "additionalProperties", "nullable", "default", "format", "title", "strict",
    "return", "response", "$defs", "$ref", "minimum", "maximum",
})  # fmt: skip
"""Words of tool definitions that templates look for, which are never cleaned."""
_GAP = TextPart("\n\n")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as the chat template takes it.

    tools: as in `protocol.Tools.definitions`. variables: the template's own. With
    `continue_final` the answer continues the last message.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False

    def texts(self) -> Iterator[str]:
        """All texts that come from the user, wherever the template writes them."""
        for message in self.messages:
            yield from (part.text for part in message.content if isinstance(part, TextPart))
            yield from (message.reasoning, message.name, message.tool_call_id)
            for call in message.tool_calls:
                yield from (call.id, call.name)
                yield from strings_in(arguments_of(call.arguments))
        yield from strings_in(list(self.tools))
        yield from strings_in(dict(self.variables))


def read_chat(submit: Submit) -> Chat:
    """The chat of a request. Raises InvalidRequest for variables that the request itself sets."""
    tools = () if submit.tools is None else tuple(json.loads(submit.tools.definitions))
    template = submit.template
    return Chat(submit.messages, tools, _variables(template), template.continue_final)


def _variables(options: TemplateOptions) -> Mapping[str, Any]:
    """The template variables of a request; `enable_thinking` under both of its names."""
    param = "chat_template_kwargs"
    try:
        variables = json.loads(options.variables)
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise InvalidRequest(f"`{param}` must be an object.", param)
    if reserved := sorted(RESERVED & variables.keys()):
        raise InvalidRequest(f"`{param}` can't set `{reserved[0]}`.", param)
    if options.enable_thinking is None:
        return variables
    return {
        "enable_thinking": options.enable_thinking,
        "thinking": options.enable_thinking,
    } | variables


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call in the conversation. Raises InvalidRequest if they are no object."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest("the arguments of a tool call must be a JSON object", "messages")
    return arguments


def field_of(messages: Sequence[Message]) -> str:
    """The name of the request's field with `messages`, in its dialect."""
    param = messages[-1].param if messages else ""
    return param.partition("[")[0] or "messages"


def join_turns(messages: Iterable[Message]) -> tuple[Message, ...]:
    """`messages` with adjacent turns of a role merged, since many templates refuse two.

    Tool results stay separate, and so does the assistant's text after a call.
    """
    turns = list[Message]()
    for message in messages:
        last_turn = turns[-1] if turns else None
        is_after_call = bool(last_turn and last_turn.tool_calls and message.content)
        if last_turn and last_turn.role == message.role != "tool" and not is_after_call:
            turns[-1] = _one_turn(last_turn, message)
        else:
            turns.append(message)
    return tuple(turns)


def _one_turn(first: Message, second: Message) -> Message:
    return replace(
        first,
        content=with_gap(first.content, second.content),
        reasoning="\n\n".join(filter(None, (first.reasoning, second.reasoning))),
        tool_calls=first.tool_calls + second.tool_calls,
    )


def with_gap(
    first: tuple[ContentPart, ...], second: tuple[ContentPart, ...]
) -> tuple[ContentPart, ...]:
    """The contents of two turns as one."""
    return (*first, _GAP, *second) if first and second else first + second


def join_texts(messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` with neighbouring text parts merged, as the model reads them.

    Templates trim parts, and a control token split between two parts is whole once rendered.
    """
    return tuple(
        replace(message, content=tuple(_join_texts(message.content))) for message in messages
    )


def _join_texts(parts: Sequence[ContentPart]) -> Iterator[ContentPart]:
    for is_text, group in groupby(parts, lambda part: isinstance(part, TextPart)):
        if is_text:
            yield TextPart("".join(part.text for part in group if isinstance(part, TextPart)))
        else:
            yield from group


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from strings_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings_in(inner)


def clean_values(value: Any, clean: Callable[[str], str]) -> Any:
    """A JSON value with its strings cleaned by `clean`, except those that templates look for."""
    if isinstance(value, str):
        return value if value in _STRUCTURE else clean(value)
    if isinstance(value, Mapping):
        return {
            clean_values(key, clean): clean_values(inner, clean) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean_values(inner, clean) for inner in value]
    return value


def fold_system(
    messages: Sequence[Message], *, takes_first: bool, takes_later: bool
) -> tuple[Message, ...]:
    """`messages` with the system messages that the template refuses as user turns."""
    return join_turns(
        replace(message, role="user")
        if message.role == "system" and not (takes_later if index else takes_first)
        else message
        for index, message in enumerate(join_turns(messages))
    )
