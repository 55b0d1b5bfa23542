"""From the body of a request for a message to a `Submit`, with all limits checked.

Runs on a thread or in a parsing process: see `api.parsing`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlm_server.api.dialects.anthropic import schema
from vlm_server.api.dialects.anthropic.builtin_tools import (
    FIELDS_OF_BUILTIN,
    builtin_tool,
    fields_without_effect,
)
from vlm_server.api.dialects.anthropic.citations import CitedDocument
from vlm_server.api.dialects.anthropic.messages import (
    BILLING_HEADER,
    has_billing_header,
    parse_messages,
)
from vlm_server.api.dialects.fields import submit_of, to_count_request
from vlm_server.api.dialects.reasoning import ReasoningOptions, asks_effort
from vlm_server.api.parsing.common_fields import (
    ConstraintFields,
    check_constraints,
    max_tokens_or_default,
    model_wanted,
    stop_strings,
)
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.json_schema import schema_text
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.api.parsing.tools import ToolChoice, ToolDefinition, read_tools
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Message, SamplingParams
from vlm_server.settings import Limits

DIALECT = "anthropic"
COUNT_DIALECT = "anthropic-count"
_FIELDS = ConstraintFields("output_config.format", continued="messages")
_NOT_IN_PROMPT = (
    *("max_tokens", "output_config.format", "stop_sequences", "stream", "temperature"),
    *("thinking.budget_tokens", "thinking.display", "top_k", "top_p"),
    *("tool_choice.disable_parallel_tool_use", "tool_choice.name", "tools[].strict"),
)
"""Fields of the answer, without effect on token counts."""


class Options(msgspec.Struct, frozen=True):
    """The renderer's options. Without `shows_reasoning` thinking blocks have no text.

    cited: the documents whose pages the answer may cite.
    """

    shows_reasoning: bool = True
    cited: tuple[CitedDocument, ...] = ()


def parse_message(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError and BytesNeeded."""
    return _parsed_request(*schema.parse(body), context)


def parse_count(body: Body, context: Context) -> ParsedRequest:
    """As `parse_message`, for a request to count tokens."""
    return to_count_request(_parsed_request(*schema.parse(body, _NOT_IN_PROMPT), context))


def _parsed_request(
    request: schema.MessagesRequest, ignored: IgnoredFields, context: Context
) -> ParsedRequest:
    model = model_wanted(request.model, context)
    conversation = Conversation.of(context)
    definitions = [
        _definition(tool, f"tools[{i}]", ignored) for i, tool in enumerate(request.tools or ())
    ]
    tools = read_tools(definitions, _choice(request, ignored), conversation)
    cited = parse_messages(request, conversation, ignored)
    continues = _continues(conversation.messages)
    schema_wanted = _schema(request, context.limits)
    json_schema = check_constraints(tools, schema_wanted, _FIELDS, ignored, continues=continues)
    reasoning = _reasoning(request)
    config = request.output_config
    is_disabled = isinstance(request.thinking, schema.ThinkingDisabled)
    if config and (is_disabled or not model.can_reason):
        ignored.add("output_config.effort", config.effort)
    if not model.can_reason:
        ignored.add("thinking", request.thinking)
    sampling = _sampling(request, json_schema, reasoning.max_tokens, context.limits)
    template = reasoning.template_options(continue_final=continues)
    submit = submit_of(conversation, context, sampling, tools, template)
    if has_billing_header(request):
        ignored.add(BILLING_HEADER)
    is_omitted = getattr(request.thinking, "display", None) == "omitted"
    options = msgspec.msgpack.encode(Options(not is_omitted, tuple(cited)))
    return ParsedRequest(model.name, submit, bool(request.stream), options, ignored.names)


def _continues(messages: Sequence[Message]) -> bool:
    """Whether the answer continues the assistant's last message. Raises InvalidRequest."""
    last_message = messages[-1]
    if last_message.role != "assistant":
        return False
    if last_message.tool_calls:
        raise InvalidRequest(
            "The last message has a `tool_use` without its result.", last_message.param
        )
    return True


def _reasoning(request: schema.MessagesRequest) -> ReasoningOptions:
    """The fields about reasoning: `thinking` wins over `output_config.effort`."""
    effort = request.output_config.effort if request.output_config else None
    match request.thinking:
        case schema.ThinkingDisabled():
            return ReasoningOptions({"thinking": False})
        case schema.ThinkingEnabled(budget_tokens=budget):
            return ReasoningOptions({"thinking": True}, effort, (budget,))
        case schema.ThinkingAdaptive(budget_tokens=budget):
            return ReasoningOptions({"thinking": asks_effort(effort)}, effort, (budget,))
    return ReasoningOptions({"thinking": asks_effort(effort)}, effort)


def _schema(request: schema.MessagesRequest, limits: Limits) -> str | None:
    if request.output_config is None or request.output_config.format is None:
        return None
    return schema_text(request.output_config.format.schema, limits, "output_config.format.schema")


def _sampling(
    request: schema.MessagesRequest,
    json_schema: str | None,
    max_reasoning_tokens: int | None,
    limits: Limits,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens_or_default(request.max_tokens, limits),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=stop_strings(request.stop_sequences, "stop_sequences", limits),
        json_schema=json_schema,
        max_reasoning_tokens=max_reasoning_tokens,
    )


def _definition(tool: schema.Tool, param: str, ignored: IgnoredFields) -> ToolDefinition:
    is_builtin = tool.type not in (None, "custom")
    for name in fields_without_effect(tool) if is_builtin else FIELDS_OF_BUILTIN:
        ignored.add(f"tools[].{name}", getattr(tool, name))
    if is_builtin:
        return builtin_tool(tool, param)
    strict = bool(tool.strict)
    return ToolDefinition(tool.name, param, tool.description, tool.input_schema, strict)


def _choice(request: schema.MessagesRequest, ignored: IgnoredFields) -> ToolChoice:
    match request.tool_choice:
        case schema.NoChoice():
            return ToolChoice("none")
        case schema.NamedChoice(name=name, disable_parallel_tool_use=one_at_most):
            if one_at_most is False:
                ignored.add("tool_choice.disable_parallel_tool_use")
            return ToolChoice("required", (name,), parallel=False, param="tool_choice.name")
        case schema.AnyChoice(disable_parallel_tool_use=one_at_most):
            return ToolChoice("required", parallel=not one_at_most)
        case schema.AutoChoice(disable_parallel_tool_use=one_at_most):
            return ToolChoice("auto", parallel=not one_at_most)
    return ToolChoice()
