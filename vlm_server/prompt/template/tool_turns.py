"""Tool calls and results, arranged as a chat template can render them.

Images keep their order, even if they are moved to another turn.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from vlm_server.prompt.template.chat import arguments_of, with_gap
from vlm_server.protocol import ContentPart, Message, TextPart, ToolCall, VideoPart

MakeId = Callable[[ToolCall, int], str]
"""Makes the id that a template takes from (call, its number in the conversation)."""


def given_id(call: ToolCall, index: int) -> str:
    """The client's own id, or a made-up one."""
    return call.id or f"call_{index}"


def short_id(call: ToolCall, index: int) -> str:
    """An id of nine letters and digits, as Mistral's templates require."""
    return hashlib.sha256(given_id(call, index).encode()).hexdigest()[:9]


def numbered_id(call: ToolCall, index: int) -> str:
    """An id as Kimi's models write them."""
    return f"functions.{call.name}:{index}"


def name_results(messages: Sequence[Message], make_id: MakeId) -> tuple[Message, ...]:
    """`messages` where each call has an id, and each result the id and the name of its call.

    A result without an id is that of the oldest call (of its name, if it has one) in the newest
    turn with an open call. Adjacent results are sorted by call: many templates show neither ids nor
    names.
    """
    known_ids = {call.id for message in messages for call in message.tool_calls}
    known_ids |= {message.tool_call_id for message in messages}
    open_calls = defaultdict[tuple[str, str], list[_WaitingCall]](list)
    """Calls without a result, by id, by name, and all: newest turn last, in it oldest call last."""
    num_calls = 0
    named_messages: list[Message] = []
    results: list[tuple[int, Message]] = []
    for message in messages:
        turn_calls = []
        for index, call in enumerate(message.tool_calls, num_calls):
            turn_calls.append(
                _WaitingCall(call, make_id(_with_id(call, index, known_ids), index), index)
            )
        num_calls += len(turn_calls)
        for open_call in reversed(turn_calls):
            for key in {("id", open_call.call.id), ("name", open_call.call.name), _ANY}:
                open_calls[key].append(open_call)
        if turn_calls:
            calls = tuple(replace(open_call.call, id=open_call.new_id) for open_call in turn_calls)
            message = replace(message, tool_calls=calls)
        if message.role == "tool":
            answered_call = _take(open_calls[_key_of(message)])
            if answered_call is None:  # no such call in the conversation
                call = ToolCall(message.tool_call_id, message.name, "{}")
                new_id = make_id(_with_id(call, num_calls, known_ids), num_calls)
                answered_call = _WaitingCall(call, new_id, num_calls)
            result = replace(
                message, tool_call_id=answered_call.new_id, name=answered_call.call.name
            )
            results.append((answered_call.index, result))
            continue
        named_messages += _in_order(results)
        results.clear()
        named_messages.append(message)
    return (*named_messages, *_in_order(results))


def _in_order(results: Iterable[tuple[int, Message]]) -> Iterator[Message]:
    """Results in the order of their calls."""
    return (result for _, result in sorted(results, key=itemgetter(0)))


def _with_id(call: ToolCall, index: int, known_ids: Container[str]) -> ToolCall:
    """`call` with a unique id."""
    new_id = call.id or given_id(call, index)
    while not call.id and new_id in known_ids:
        new_id += "_"
    return replace(call, id=new_id)


def _take(open_calls: list[_WaitingCall]) -> _WaitingCall | None:
    """Remove and return the next call without a result; None if there is none."""
    while open_calls:
        open_call = open_calls.pop()
        if not open_call.is_taken:
            open_call.is_taken = True
            return open_call
    return None


@dataclass(slots=True)
class _WaitingCall:
    """A call, its new id, and its number in the conversation."""

    call: ToolCall
    new_id: str
    index: int
    is_taken: bool = False


_ANY = ("any", "")


def _key_of(result: Message) -> tuple[str, str]:
    if result.tool_call_id:
        return "id", result.tool_call_id
    return ("name", result.name) if result.name else _ANY


def split_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages with one call in each turn, followed by its result; calls and results have ids."""
    moved = set[int]()
    for index, message in enumerate(messages):
        if index in moved:
            continue
        yield replace(message, tool_calls=message.tool_calls[:1])
        for call, next_call in pairwise(message.tool_calls):
            later = enumerate(messages[index + 1 :], index + 1)
            for place, result in later:
                if result.role == "tool" and result.tool_call_id == call.id:
                    moved.add(place)
                    yield result
                    break
            yield Message("assistant", (), tool_calls=(next_call,), param=message.param)


def join_text_to_reasoning(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages with the text before a call made a part of the reasoning before it."""
    for message in messages:
        text = "".join(part.text for part in message.content if isinstance(part, TextPart))
        if message.tool_calls and message.reasoning and text:
            reasoning = f"{message.reasoning}\n\n{text}"
            message = replace(message, reasoning=reasoning, content=())
        yield message


def move_media_to_user(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages with the media of tool results moved to the next user turn, and pointers to them."""
    media: list[ContentPart] = []
    for message in messages:
        if message.role == "tool":
            yield replace(message, content=tuple(_pointers(message.content, media)))
            continue
        if media and message.role == "user":
            message = replace(message, content=(*media, *message.content))
        elif media:
            yield Message("user", tuple(media))
        media.clear()
        yield message
    if media:
        yield Message("user", tuple(media))


def _pointers(parts: Sequence[ContentPart], media: list[ContentPart]) -> Iterator[ContentPart]:
    """`parts` as texts only; media are added to `media`."""
    for part in parts:
        if isinstance(part, TextPart):
            yield part
            continue
        media.append(part)
        kind = "video" if isinstance(part, VideoPart) else "image"
        yield TextPart(f"[{kind} {len(media)}, shown below]")


def add_to_results(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages with a user's text after a tool's result made a part of that result."""
    result: Message | None = None
    for message in messages:
        if result is not None and message.role == "user":
            result = replace(result, content=with_gap(result.content, message.content))
            continue
        if result is not None:
            yield result
        result = message if message.role == "tool" else None
        if result is None:
            yield message
    if result is not None:
        yield result


Marks = tuple[str, str]
"""The texts before and after a call."""


def write_as_text(messages: Sequence[Message], marks: Marks | None) -> Iterator[Message]:
    """Messages with calls as JSON in the assistant's text, each between `marks` if there are any,
    and their results as user turns."""
    results: list[ContentPart] = []
    for message in messages:
        if message.role == "tool":
            title = f"Result of {message.name or message.tool_call_id}:\n"
            results += [TextPart("\n" + title if results else title), *message.content]
            continue
        if results:
            yield Message("user", tuple(results))
            results.clear()
        if message.tool_calls:
            text = TextPart(
                ("\n" if message.content else "") + _calls_text(message.tool_calls, marks)
            )
            message = replace(message, content=(*message.content, text), tool_calls=())
        yield message
    if results:
        yield Message("user", tuple(results))


def _calls_text(calls: Sequence[ToolCall], marks: Marks | None) -> str:
    calls_json = [{"name": call.name, "arguments": arguments_of(call.arguments)} for call in calls]
    if marks is None:
        return json.dumps(calls_json, ensure_ascii=False)
    start, end = marks
    texts = (json.dumps(call, ensure_ascii=False) for call in calls_json)
    return "\n".join(f"{start}\n{text}\n{end}" for text in texts)


def instruction(tools: Sequence[Mapping[str, Any]], marks: Marks | None) -> str:
    """The instruction for a model whose template can't render tools.

    It may call them, each call between `marks`; without marks it must.
    """
    if marks is None:
        form = 'Answer with calls alone, as a JSON list in this form: [{"name": "<tool>", '
        form += '"arguments": {...}}]'
    else:
        start, end = marks
        form = "To call one, write its name and arguments as JSON between marks, in this form:\n"
        form += f'{start}\n{{"name": "<tool>", "arguments": {{...}}}}\n{end}\n'
        form += "If no tool is needed, answer as usual."
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"You can call these tools:\n{lines}\n{form}"


def with_instruction(
    messages: Sequence[Message], text: str, *, takes_system: bool
) -> Iterator[Message]:
    """`messages` with `text` in the system message, else in the first message."""
    first_message, *other_messages = messages
    if first_message.role == "system":
        yield replace(first_message, content=(*first_message.content, TextPart("\n\n" + text)))
    elif takes_system:
        yield Message("system", (TextPart(text),))
        yield first_message
    else:
        yield replace(first_message, content=(TextPart(text + "\n\n"), *first_message.content))
    yield from other_messages
