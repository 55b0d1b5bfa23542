"""From the body of a chat request to a `Submit`, with all limits checked.

Runs on a thread or in an intake process: see `http.intake`.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from vlm_server.api.dialects.openai import schema
from vlm_server.api.dialects.openai.history import parts_of, read_messages
from vlm_server.api.dialects.openai.messages import ImageUrlPart, VideoUrlPart
from vlm_server.api.dialects.openai.options import Options, encode_options
from vlm_server.api.dialects.openai.response_format import ignore_labels, read_schema
from vlm_server.api.dialects.openai.sampling import read_sampling
from vlm_server.api.dialects.openai.schema import ChatRequest, PixelLimits, StreamOptions
from vlm_server.api.dialects.openai.thinking import ThinkingFields
from vlm_server.api.dialects.openai.tools import choice_of, definitions_of
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import (
    ConstraintFields,
    check_constraints,
    model_wanted,
    must_call,
)
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.leniency import IgnoredFields
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.api.parsing.tools import read_tools
from vlm_server.errors import InvalidRequest, UnsupportedField
from vlm_server.protocol import Submit, Tools

DIALECT = "openai"
_FIELDS = ConstraintFields("response_format", continued="continue_final_message")


def read_chat(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError.

    Raises BytesNeeded if it has `https:` or `file:` URLs whose bytes are not in `context.given`,
    and no error besides: to be called again with them.
    """
    return read_fields(json_body.parse_object(body), context)


def read_text(body: Body, context: Context) -> ParsedRequest | None:
    """The request in `body`; None if it has media. Raises RequestError."""
    return read_text_fields(json_body.parse_object(body), context)


def read_fields(fields: dict[str, Any], context: Context) -> ParsedRequest:
    """The request of a body's fields: see `read_chat`."""
    ignored = IgnoredFields()
    return _named(_parsed_request(_read(fields, context, ignored), context, ignored), fields)


def read_text_fields(fields: dict[str, Any], context: Context) -> ParsedRequest | None:
    """The request of a body's fields: see `read_text`."""
    ignored = IgnoredFields()
    request = _read(fields, context, ignored)
    parts = parts_of(request.messages)
    has_media = any(isinstance(part, ImageUrlPart | VideoUrlPart) for part in parts)
    return None if has_media else _named(_parsed_request(request, context, ignored), fields)


def read_pixel_limits(wanted: PixelLimits | None, conversation: Conversation) -> None:
    """The sizes that all images of a request are to have. Raises InvalidRequest."""
    if wanted is None:
        return
    least, most = wanted.min_pixels, wanted.max_pixels
    if least is not None and most is not None and least > most:
        raise InvalidRequest(
            "`min_pixels` is above `max_pixels`.", "mm_processor_kwargs.min_pixels"
        )
    conversation.min_pixels, conversation.max_pixels = least, most


def _named(parsed: ParsedRequest, fields: dict[str, Any]) -> ParsedRequest:
    """`parsed` with the name that its client has for requests with the same beginning, if any."""
    name = fields.get("prompt_cache_key")
    return structs.replace(parsed, conversation=name) if isinstance(name, str) else parsed


def _read(fields: dict[str, Any], context: Context, ignored: IgnoredFields) -> ChatRequest:
    return schema.read(fields, ignored, refuses=context.unknown_fields == "refuse")


def _parsed_request(
    request: ChatRequest, context: Context, ignored: IgnoredFields
) -> ParsedRequest:
    model = model_wanted(request.model, context)
    options = _options(request, ignored)
    conversation = Conversation(context.limits, context.given)
    read_pixel_limits(request.mm_processor_kwargs, conversation)
    tools = _tools(request, conversation)
    continues = _continues(request)
    wanted = read_schema(request.response_format, context.limits)
    json_schema = check_constraints(tools, wanted, _FIELDS, ignored, continues=continues)
    if json_schema is not None:
        ignore_labels(request.response_format, ignored)
    if not model.can_think:
        for name in ("reasoning_effort", "thinking", "reasoning"):
            ignored.add(name, getattr(request, name))
    thinking = ThinkingFields(
        request.reasoning_effort, request.thinking, request.reasoning, request.chat_template_kwargs
    )
    sampling = read_sampling(
        request,
        context.limits,
        json_schema=json_schema,
        must_call=must_call(tools),
        max_reasoning_tokens=thinking.max_tokens(),
    )
    template = thinking.template_options(continue_final=continues)
    read_messages(request.messages, conversation, ignored)
    prediction = "" if request.prediction is None else request.prediction.text
    submit = Submit(
        request_id=context.request_id,
        messages=tuple(conversation.messages),
        images=tuple(conversation.images),
        sampling=sampling,
        videos=tuple(conversation.videos),
        cache_salt=context.cache_salt,
        client=context.client,
        tools=tools,
        template=template,
        prediction=conversation.count_text(prediction, "prediction.content"),
    )
    return ParsedRequest(
        model.name, submit, bool(request.stream), encode_options(options), ignored.names
    )


def _options(request: ChatRequest, ignored: IgnoredFields) -> Options:
    wanted = request.stream_options
    if wanted is None:
        wanted = StreamOptions()
    elif not request.stream:
        raise InvalidRequest("`stream_options` requires `stream`.", "stream_options")
    if wanted.include_obfuscation:
        ignored.add("stream_options.include_obfuscation")
    return Options(bool(wanted.include_usage), bool(wanted.continuous_usage_stats))


def _tools(request: ChatRequest, conversation: Conversation) -> Tools | None:
    choice = choice_of(request.tool_choice, parallel=request.parallel_tool_calls is not False)
    return read_tools(definitions_of(request.tools), choice, conversation)


def _continues(request: ChatRequest) -> bool:
    """Whether the answer goes on where the last message ends. Raises InvalidRequest."""
    param = "continue_final_message"
    is_assistants = request.messages[-1].role == "assistant"
    if not request.continue_final_message:
        if request.add_generation_prompt is False:
            raise UnsupportedField(
                f"`add_generation_prompt` may be false with `{param}` only.",
                "add_generation_prompt",
            )
        if is_assistants:
            raise InvalidRequest(
                "The last message is the assistant's; it is continued with "
                f"`{param}: true`. Otherwise end with a message of role 'user' or 'tool'.",
                f"messages[{len(request.messages) - 1}]",
            )
        return False
    if request.add_generation_prompt:
        raise InvalidRequest(f"`{param}` and `add_generation_prompt` exclude each other.", param)
    if not is_assistants or request.messages[-1].tool_calls:
        raise InvalidRequest(
            f"`{param}` needs a last message that is the assistant's and has no calls.", param
        )
    return True
