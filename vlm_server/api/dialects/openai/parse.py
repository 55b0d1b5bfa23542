"""From the body of a chat request to a `Submit`, with all limits checked.

Runs on a thread or in a parsing process: see `api.parsing`.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct, msgpack

from vlm_server.api.dialects.fields import ignore_labels, submit_of, tool_definitions
from vlm_server.api.dialects.openai import schema
from vlm_server.api.dialects.openai.messages import parse_messages
from vlm_server.api.dialects.reasoning import MODES, ReasoningOptions, asks_effort
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import (
    ConstraintFields,
    check_constraints,
    max_tokens_or_default,
    model_wanted,
    must_call,
    stop_strings,
)
from vlm_server.api.parsing.conversation import Conversation
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.json_schema import ANY_OBJECT, schema_text
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.api.parsing.tools import ToolChoice, read_tools
from vlm_server.errors import InvalidRequest, UnsupportedField
from vlm_server.protocol import SamplingParams
from vlm_server.settings import Limits

DIALECT = "openai"
_FIELDS = ConstraintFields("response_format", continued="continue_final_message")
NAMED_SCHEMA = "response_format.json_schema"
_ENABLE_THINKING = "enable_thinking"
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""The only form of a token id. The engine checks that the id exists."""


class Options(Struct, frozen=True):
    """The renderer's options: usage in the stream's last chunk, and in all of its chunks."""

    include_usage: bool = False
    continuous_usage: bool = False


def parse_chat(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError and BytesNeeded."""
    return parse_fields(json_body.parse_object(body), context)


def parse_fields(fields: dict[str, Any], context: Context) -> ParsedRequest:
    """The request of a body's fields: see `parse_chat`."""
    request, ignored = schema.parse(fields, context)
    model = model_wanted(request.model, context)
    options = encode_options(request, ignored)
    conversation = Conversation.of(context)
    conversation.set_media_options(request.media_options)
    choice = _choice(request.tool_choice, parallel=request.parallel_tool_calls is not False)
    tools = read_tools(
        tool_definitions((tool.function for tool in request.tools or ()), "tools[{}].function"),
        choice,
        conversation,
    )
    continues = _continues(request)
    json_schema = parse_response_format(request.response_format, context.limits)
    json_schema = check_constraints(tools, json_schema, _FIELDS, ignored, continues=continues)
    if json_schema is not None and request.response_format is not None:
        ignore_labels(request.response_format.json_schema, NAMED_SCHEMA, ignored)
    if not model.can_reason:
        for field in ("reasoning_effort", "thinking", "reasoning"):
            ignored.add(field, getattr(request, field))
    reasoning = _reasoning(request)
    sampling = parse_sampling(
        request,
        context.limits,
        max_tokens=_max_tokens(request),
        logprobs=_logprobs(bool(request.logprobs), request.top_logprobs or 0),
        json_schema=json_schema,
        must_call=must_call(tools),
        max_reasoning_tokens=reasoning.max_tokens,
    )
    template = reasoning.template_options(continue_final=continues)
    parse_messages(request.messages, conversation, ignored)
    prediction = "" if request.prediction is None else request.prediction.text
    conversation.count_text(prediction, "prediction.content")
    submit = submit_of(conversation, context, sampling, tools, template, prediction)
    name = fields.get("prompt_cache_key")
    return ParsedRequest(
        model.name,
        submit,
        bool(request.stream),
        options,
        ignored.names,
        conversation=name if isinstance(name, str) else "",
    )


def encode_options(request: schema.AnswerFields, ignored: IgnoredFields) -> bytes:
    """The encoded `Options`. Raises InvalidRequest for `stream_options` without a stream."""
    stream_options = request.stream_options
    if stream_options is None:
        stream_options = schema.StreamOptions()
    elif not request.stream:
        raise InvalidRequest("`stream_options` requires `stream`.", "stream_options")
    if stream_options.include_obfuscation:
        ignored.add("stream_options.include_obfuscation")
    return msgpack.encode(
        Options(bool(stream_options.include_usage), bool(stream_options.continuous_usage_stats))
    )


def _continues(request: schema.ChatRequest) -> bool:
    """Whether the answer continues the last message. Raises InvalidRequest."""
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


# ---- tools -------------------------------------------------------------------------------


def _choice(choice: schema.WantedChoice | None, *, parallel: bool) -> ToolChoice:
    """`tool_choice` in the form of all dialects. A named tool is called once."""
    match choice:
        case schema.NamedTool(function=function):
            return ToolChoice("required", (function.name,), parallel=False)
        case schema.AllowedToolsChoice(allowed_tools=allowed):
            names = tuple(tool.function.name for tool in allowed.tools)
            return ToolChoice(allowed.mode, names, parallel)
        case None:
            return ToolChoice(parallel=parallel)
        case mode:
            return ToolChoice(mode, parallel=parallel)


# ---- the answer --------------------------------------------------------------------------


def parse_response_format(
    response_format: schema.ResponseFormat | None, limits: Limits
) -> str | None:
    """The JSON schema that the answer must match; None for free text. Raises InvalidRequest."""
    match response_format:
        case schema.JsonObjectFormat():
            return ANY_OBJECT
        case schema.JsonSchemaFormat(json_schema=named):
            return schema_text(named.schema, limits, f"{NAMED_SCHEMA}.schema")
    return None


def _reasoning(request: schema.ChatRequest) -> ReasoningOptions:
    """The reasoning fields of OpenAI, Anthropic, OpenRouter and vLLM. Raises InvalidRequest."""
    thinking = request.thinking or schema.Thinking("auto")
    reasoning = request.reasoning or schema.ReasoningConfig()
    variables = dict(request.chat_template_kwargs or {})
    enabled = variables.pop(_ENABLE_THINKING, None)
    param = f"chat_template_kwargs.{_ENABLE_THINKING}"
    if not isinstance(enabled, bool | None):
        raise InvalidRequest(f"`{param}` must be `true` or `false`.", param)
    return ReasoningOptions(
        {
            "reasoning_effort": asks_effort(request.reasoning_effort),
            "thinking": MODES[thinking.type],
            "reasoning.effort": asks_effort(reasoning.effort),
            "reasoning.enabled": reasoning.enabled,
            param: enabled,
        },
        request.reasoning_effort or reasoning.effort,
        (thinking.budget_tokens, reasoning.max_tokens),
        variables,
    )


def parse_sampling(
    request: schema.AnswerFields,
    limits: Limits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    json_schema: str | None,
    must_call: bool = False,
    max_reasoning_tokens: int | None = None,
) -> SamplingParams:
    """The sampling parameters of a request. Raises InvalidRequest."""
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest("`min_tokens` is above `max_tokens`.", "min_tokens")
    if must_call or json_schema is not None:
        _check_ends(request)
    stream_options = request.stream_options
    return SamplingParams(
        max_tokens=max_tokens_or_default(max_tokens, limits, min_tokens),
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop=stop_strings(request.stop, "stop", limits),
        top_k=None if request.top_k is None else max(request.top_k, 0),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty,
        logit_bias=_logit_bias(request.logit_bias or {}),
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        n=request.n or 1,
        json_schema=json_schema,
        max_reasoning_tokens=max_reasoning_tokens,
        reports_usage=stream_options is not None and bool(stream_options.continuous_usage_stats),
    )


def _check_ends(request: schema.AnswerFields) -> None:
    """Raises InvalidRequest for `min_tokens` or `ignore_eos`: JSON ends where it is complete."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise InvalidRequest(
                f"`{name}` can't be combined with a JSON `response_format`, nor with calls that "
                "must be made.",
                name,
            )


def _max_tokens(request: schema.ChatRequest) -> int | None:
    values = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(values) > 1:
        raise InvalidRequest(
            "`max_tokens` and `max_completion_tokens` differ; send only one.", "max_tokens"
        )
    return values.pop() if values else None


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if not all(map(_TOKEN_ID.fullmatch, bias)):
        raise InvalidRequest("`logit_bias` has a key that is not a token id.", "logit_bias")
    return {int(token_id): value for token_id, value in bias.items()}


def _logprobs(logprobs: bool, num_top: int) -> int | None:
    if num_top and not logprobs:
        raise InvalidRequest("`top_logprobs` requires `logprobs`.", "top_logprobs")
    return num_top if logprobs else None
