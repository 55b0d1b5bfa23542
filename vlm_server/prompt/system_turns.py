"""System messages where a chat template has no place for them: the user says them instead."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from vlm_server.protocol import Message, TextPart

_BETWEEN = TextPart("\n\n")


def fold_system(
    messages: Sequence[Message], *, takes_first: bool, takes_later: bool
) -> tuple[Message, ...]:
    """`messages` without system messages that the template refuses; their texts stay in place.

    Each becomes part of the user's turn beside it, or a turn of the user's own.
    """
    folded, joins = list[Message](), False
    for index, message in enumerate(messages):
        is_refused = message.role == "system" and not (takes_later if index else takes_first)
        if is_refused:
            message = replace(message, role="user")
        if folded and folded[-1].role == message.role == "user" and (is_refused or joins):
            content = (*folded[-1].content, _BETWEEN, *message.content)
            folded[-1] = replace(folded[-1], content=content)
        else:
            folded.append(message)
        joins = is_refused
    return tuple(folded)
