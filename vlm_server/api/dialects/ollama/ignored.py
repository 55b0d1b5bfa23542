"""Which fields of a request have no effect: they are named in the log and in a header."""

from __future__ import annotations

from typing import Any

from vlm_server.api.dialects.ollama.schema import ChatMessage, OllamaChatRequest, Request
from vlm_server.api.parsing.leniency import IgnoredFields
from vlm_server.api.parsing.parsed_request import Context, KnownModel

_OF_ROLE = {
    "thinking": "assistant",
    "tool_calls": "assistant",
    "tool_name": "tool",
    "name": "tool",
    "tool_call_id": "tool",
}
"""Fields that messages of one role have."""


def ignored_fields(
    fields: dict[str, Any], request: Request, model: KnownModel, context: Context
) -> IgnoredFields:
    """The paths of fields without effect, such as `options.num_ctx`; `request` is what became of
    `fields`."""
    ignored = IgnoredFields()
    if model.stays_loaded or not context.is_admin:
        ignored.add("keep_alive", request.keep_alive)
    if not request.logprobs:
        ignored.add("top_logprobs", request.top_logprobs or None)
    if not model.can_think:
        ignored.add("think", request.think)
    ignored.add_unread(fields, request)
    if isinstance(request, OllamaChatRequest):
        for message in request.messages or ():
            _add_misplaced(message, ignored)
    return ignored


def _add_misplaced(message: ChatMessage, ignored: IgnoredFields) -> None:
    if message.tool_name and message.name != message.tool_name:
        ignored.add("messages[].name", message.name)
    for name, role in _OF_ROLE.items():
        if message.role != role:
            ignored.add(f"messages[].{name}", getattr(message, name))
