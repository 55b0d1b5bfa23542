"""From the body of a request for a response to a `Submit`, with all limits checked.

Runs on a thread or in a parsing process: see `api.parsing`.
"""

from __future__ import annotations

import msgspec

from vlm_server.api.dialects.fields import (
    check_counts,
    ignore_labels,
    submit_of,
    to_count_request,
    tool_definitions,
)
from vlm_server.api.dialects.reasoning import MODES, ReasoningOptions, asks_effort
from vlm_server.api.dialects.responses import items, schema
from vlm_server.api.dialects.responses.echo import Options, encode, encode_echo
from vlm_server.api.dialects.responses.messages import MessageBuilder
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import (
    ConstraintFields,
    check_constraints,
    max_tokens_or_default,
    model_wanted,
    must_call,
)
from vlm_server.api.parsing.conversation import Conversation, NeedsProcess
from vlm_server.api.parsing.json_schema import ANY_OBJECT, schema_text
from vlm_server.api.parsing.parsed_request import Body, Context, HistoryNeeded, ParsedRequest
from vlm_server.api.parsing.tools import ToolChoice, read_tools
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import SamplingParams
from vlm_server.settings import Limits

DIALECT, COUNT_DIALECT = "responses", "responses-count"
ID_PREFIX = "resp_"
_PREVIOUS_ID = "previous_response_id"

_items_decoder = msgspec.json.Decoder(list[items.Item])


def parse_response(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError, HistoryNeeded and BytesNeeded."""
    turns = (*(context.previous or ()), *context.others)
    if context.on_thread and not _are_small(turns):
        raise NeedsProcess
    parsed = schema.parse(body, context)
    return _parsed_request(*_with_history(parsed, context), context)


def _are_small(turns: tuple[bytes, ...]) -> bool:
    return sum(map(len, turns)) <= json_body.SMALL_BYTES and json_body.is_small(b"".join(turns))


def parse_count(body: Body, context: Context) -> ParsedRequest:
    """As `parse_response`, for a request to count tokens."""
    return to_count_request(parse_response(body, context))


def _with_history(
    parsed: schema.ParsedBody, context: Context
) -> tuple[schema.ParsedBody, list[items.Item]]:
    """`parsed` with its references resolved, and the items of earlier turns.

    Raises HistoryNeeded if `context` does not have them, and NotFound.
    """
    request = parsed.request
    hexes = dict.fromkeys(filter(None, map(items.request_hex_of, request.references)))
    previous_id = request.previous_response_id
    if context.previous is None and (hexes or previous_id is not None):
        json_body.utf8_length(previous_id or "", _PREVIOUS_ID)
        raise HistoryNeeded(previous_id, tuple(f"{ID_PREFIX}{digits}" for digits in hexes))
    previous_items, other_items = _items_of(context.previous or ()), _items_of(context.others)
    if not isinstance(request.input, str):
        resolved_items = items.resolve(request.input, [*other_items, *previous_items])
        request = msgspec.structs.replace(request, input=resolved_items)
    return parsed._replace(request=request), previous_items


def _items_of(turns: tuple[bytes, ...]) -> list[items.Item]:
    return [item for turn in turns for item in _items_decoder.decode(turn)]


def _parsed_request(
    parsed: schema.ParsedBody, previous: list[items.Item], context: Context
) -> ParsedRequest:
    request = parsed.request
    model = model_wanted(request.model, context)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("`stream_options` requires `stream`.", "stream_options")
    if request.background and request.store is False:
        raise InvalidRequest("`background` requires `store`.", "background")
    conversation = Conversation.of(context, "input")
    conversation.set_media_options(request)
    definitions = tool_definitions(request.tools or (), "tools[{}]")
    tools = read_tools(definitions, _choice(request), conversation)
    reasoning = _reasoning(request)
    template = reasoning.template_options(continue_final=items.is_unfinished(request.items[-1]))
    if not model.can_reason:
        parsed.ignored.add("reasoning", request.reasoning)
        parsed.ignored.add("thinking", request.thinking)
    json_schema = check_constraints(
        tools,
        _json_schema(request, context.limits),
        ConstraintFields("text.format", f"input[{len(request.items) - 1}].status"),
        parsed.ignored,
        continues=template.continue_final,
    )
    if request.ignore_eos and (json_schema is not None or must_call(tools)):
        raise InvalidRequest(
            "`ignore_eos` can't be combined with a JSON `text.format`, nor with calls that must "
            "be made.",
            "ignore_eos",
        )
    text_format = request.text.format if request.text else None
    if json_schema is not None and isinstance(text_format, schema.JsonSchemaFormat):
        ignore_labels(text_format, "text.format", parsed.ignored)
    sampling = _sampling(request, json_schema, reasoning.max_tokens, context.limits)
    _parse_messages(request, previous, conversation)
    submit = submit_of(conversation, context, sampling, tools, template)
    return ParsedRequest(
        model.name,
        submit,
        bool(request.stream),
        _options(parsed, context),
        parsed.ignored.names,
        conversation=name if isinstance(name := parsed.echoed["prompt_cache_key"], str) else "",
        background=bool(request.background),
    )


def _options(parsed: schema.ParsedBody, context: Context) -> bytes:
    request = parsed.request
    stored_input = b""
    if request.store is not False:
        stored_input = encode(
            items.normalize(request.items, context.request_id.removeprefix(ID_PREFIX))
        )
    namespaces = {tool.name: tool.namespace for tool in request.tools or () if tool.namespace}
    return msgspec.msgpack.encode(
        Options(
            context.owner,
            encode_echo(parsed),
            stored_input,
            request.previous_response_id,
            namespaces,
            bool(request.background),
        )
    )


# ---- the conversation ------------------------------------------------------------------


def _parse_messages(
    request: schema.ResponsesRequest, previous: list[items.Item], conversation: Conversation
) -> None:
    input_items = request.items
    contents = [items.content_of(item) for item in (*previous, *input_items)]
    check_counts(
        len(previous) + len(input_items),
        contents,
        conversation.limits,
        image=(items.InputImage, items.InputFile),
        video=items.InputVideo,
        num_documents=items.num_documents(contents),
        param="input",
    )
    builder = MessageBuilder(conversation)
    if request.instructions:
        builder.instruct(request.instructions)
    builder.add(previous, _PREVIOUS_ID)
    builder.add(input_items, "input")
    conversation.check_complete()
    messages = builder.messages()
    if not any(message.role == "user" for message in messages):
        raise InvalidRequest("At least one item must be a message of role 'user'.", "input")
    if messages[-1].role == "assistant" and not items.is_unfinished(input_items[-1]):
        raise InvalidRequest("The last item of `input` is the assistant's own.", "input")


# ---- the answer ------------------------------------------------------------------------


def _sampling(
    request: schema.ResponsesRequest,
    json_schema: str | None,
    max_reasoning_tokens: int | None,
    limits: Limits,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens_or_default(request.max_output_tokens, limits),
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        ignore_eos=bool(request.ignore_eos),
        logprobs=_logprobs(request),
        json_schema=json_schema,
        max_reasoning_tokens=max_reasoning_tokens,
    )


def _reasoning(request: schema.ResponsesRequest) -> ReasoningOptions:
    reasoning, thinking = request.reasoning, request.thinking
    effort = reasoning.effort if reasoning else None
    return ReasoningOptions(
        {
            "reasoning.effort": asks_effort(effort),
            "thinking": MODES[thinking.type] if thinking else None,
        },
        effort,
        (
            reasoning.max_tokens if reasoning else None,
            thinking.budget_tokens if thinking else None,
        ),
    )


def _logprobs(request: schema.ResponsesRequest) -> int | None:
    num_top = request.top_logprobs or 0
    if schema.LOGPROBS in (request.include or ()):
        return num_top
    if num_top:
        message = f"`top_logprobs` requires `{schema.LOGPROBS}` in `include`."
        raise InvalidRequest(message, "top_logprobs")
    return None


def _json_schema(request: schema.ResponsesRequest, limits: Limits) -> str | None:
    match request.text.format if request.text else None:
        case schema.JsonObjectFormat():
            return ANY_OBJECT
        case schema.JsonSchemaFormat(schema=wanted):
            return schema_text(wanted, limits, "text.format.schema")
    return None


def _choice(request: schema.ResponsesRequest) -> ToolChoice:
    parallel = request.parallel_tool_calls is not False
    match request.tool_choice:
        case schema.NamedTool(name=name):
            return ToolChoice("required", (name,), parallel=False)
        case schema.AllowedToolsChoice(mode=mode, tools=tools):
            return ToolChoice(mode, tuple(tool.name for tool in tools), parallel)
        case None:
            return ToolChoice(parallel=parallel)
        case choice:
            return ToolChoice(choice, (), parallel)
