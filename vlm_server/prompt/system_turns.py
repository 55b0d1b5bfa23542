"""System messages where a chat template has no place for them: the user says them instead."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from vlm_server.prompt.chat import join_turns
from vlm_server.protocol import Message


def fold_system(
    messages: Sequence[Message], *, takes_first: bool, takes_later: bool
) -> tuple[Message, ...]:
    """`messages` without system messages that the template refuses; their texts stay in place.

    Those that follow the first at once are part of it. Each of the others becomes a part of the
    user's turn beside it, or a turn of the user's own.
    """
    return join_turns(
        replace(message, role="user")
        if message.role == "system" and not (takes_later if index else takes_first)
        else message
        for index, message in enumerate(join_turns(messages))
    )
