"""From the body of a request to `/api/chat` or `/api/generate` to a `Submit`, with limits checked.

Runs on a thread or in a parsing process: see `api.parsing`.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, msgpack

from vlm_server.api.dialects.fields import INT32_MAX, submit_of, tool_definitions
from vlm_server.api.dialects.ollama import schema
from vlm_server.api.dialects.ollama.messages import images_and_text, parse_messages
from vlm_server.api.dialects.ollama.model_fields import keep_alive_seconds, model_wanted
from vlm_server.api.dialects.reasoning import ReasoningOptions
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import (
    ConstraintFields,
    check_constraints,
    max_tokens_or_default,
    stop_strings,
)
from vlm_server.api.parsing.conversation import Conversation, Counts
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.api.parsing.json_schema import ANY_OBJECT, schema_text
from vlm_server.api.parsing.parsed_request import Body, Context, KnownModel, ParsedRequest
from vlm_server.api.parsing.tools import ToolChoice, read_tools
from vlm_server.errors import Forbidden, UnsupportedField
from vlm_server.protocol import Message, SamplingParams, Submit, TextPart, Tools
from vlm_server.settings import Limits

CHAT = "ollama.chat"
GENERATE = "ollama.generate"
_FIELDS = ConstraintFields("format", continued="messages", calls="tools")

_GENERATION_FIELDS = frozenset({"format", "logprobs", "options", "system", "think", "tools"})
"""Fields without effect in a request that only loads or unloads the model."""
_ROLE_OF_FIELD = {
    "thinking": "assistant",
    "tool_calls": "assistant",
    "tool_name": "tool",
    "name": "tool",
    "tool_call_id": "tool",
}
"""The role of messages with a field."""
_FILL_CONTEXT = -2
_MIN_TOP_P = 1e-6
"""The value for 0, which in Ollama means the likeliest token."""


class Options(Struct, frozen=True):
    """The renderer's options.

    model: the name used by the client. done_reason: of an answer without generation, else empty.
    """

    model: str
    done_reason: str = ""


def parse_chat(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError, and BytesNeeded for URLs in `images`."""
    request, model, ignored = _parse(body, schema.OllamaChatRequest, context)
    messages = request.messages or []
    if not messages:
        return _load_request(request, model, ignored, context)
    conversation = Conversation.of(context)
    functions = (tool.function for tool in request.tools or ())
    tools = read_tools(
        tool_definitions(functions, "tools[{}].function"), ToolChoice(param="tools"), conversation
    )
    parse_messages(messages, conversation)
    return _parsed_request(request, model, ignored, conversation, tools, context)


def parse_generate(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError, and BytesNeeded for URLs in `images`."""
    request, model, ignored = _parse(body, schema.OllamaGenerateRequest, context)
    for name in ("suffix", "template", "raw"):
        if getattr(request, name):
            raise UnsupportedField(f"`{name}` is not supported; leave it out.", name)
    images = request.images or []
    if not (request.prompt or images):
        return _load_request(request, model, ignored, context)
    Counts(1, 2 + len(images), len(images), 0).check(context.limits, "images")
    conversation = Conversation.of(context, "prompt")
    if request.system:
        system = conversation.text(request.system, "system")
        conversation.add(Message("system", (system,)), "system")
    text = conversation.text(request.prompt or "", "prompt")
    message = Message("user", images_and_text(images, "images", text, conversation))
    conversation.add(message, "prompt")
    conversation.check_complete()
    return _parsed_request(request, model, ignored, conversation, None, context)


def _parse(
    body: Body, kind: type[schema.R], context: Context
) -> tuple[schema.R, KnownModel, IgnoredFields]:
    fields = json_body.parse_object(body)
    request = schema.convert(fields, kind)
    model = model_wanted(request.model, context.models)
    return request, model, _ignored_fields(fields, request, model, context)


def _parsed_request(
    request: schema.OllamaRequest,
    model: KnownModel,
    ignored: IgnoredFields,
    conversation: Conversation,
    tools: Tools | None,
    context: Context,
) -> ParsedRequest:
    continues = _continues(conversation.messages[-1])
    reasoning = _reasoning(request)
    json_schema = check_constraints(
        tools, _schema(request, context.limits), _FIELDS, ignored, continues=continues
    )
    sampling = _sampling(request, json_schema, reasoning.max_tokens, context.limits)
    template = reasoning.template_options(continue_final=continues)
    submit = submit_of(conversation, context, sampling, tools, template)
    options = msgpack.encode(Options(request.model or model.name))
    return ParsedRequest(
        model.name,
        submit,
        request.stream is not False,
        options,
        ignored.names,
        keep_alive_seconds=keep_alive_of(request.keep_alive, context),
    )


def _load_request(
    request: schema.OllamaRequest, model: KnownModel, ignored: IgnoredFields, context: Context
) -> ParsedRequest:
    """A request that loads or unloads a model. A pinned model stays.

    Raises Forbidden if the client may not unload it.
    """
    for name in sorted(_GENERATION_FIELDS & set(request.__struct_fields__)):
        ignored.add(name, getattr(request, name))
    seconds = keep_alive_of(request.keep_alive, context, unloads=True)
    options = msgpack.encode(
        Options(request.model or model.name, "load" if seconds != 0 else "unload")
    )
    submit = Submit(context.request_id, (), (), SamplingParams(), client=context.client)
    return ParsedRequest(
        model.name,
        submit,
        request.stream is not False,
        options,
        ignored.names,
        generates=False,
        keep_alive_seconds=seconds,
    )


def keep_alive_of(
    keep_alive: float | str | None, context: Context, *, unloads: bool = False
) -> float | None:
    """Seconds that the model stays loaded, which only an admin key may set.

    None for other keys. Raises Forbidden if the request only `unloads` the model.
    """
    seconds = keep_alive_seconds(keep_alive)
    if context.is_admin:
        return seconds
    if unloads and seconds == 0:
        raise Forbidden("Unloading a model needs a key with `admin = true`.", "keep_alive")
    return None


def _reasoning(request: schema.OllamaRequest) -> ReasoningOptions:
    """The fields about reasoning; a level of `think` is for templates with levels."""
    think = request.think
    wish = None if think is None else bool(think)
    return ReasoningOptions({"think": wish}, think if isinstance(think, str) else None)


def _continues(last_message: Message) -> bool:
    """Whether the answer continues the assistant's last message."""
    has_text = any(isinstance(part, TextPart) and part.text for part in last_message.content)
    return last_message.role == "assistant" and has_text and not last_message.tool_calls


# ---- the answer --------------------------------------------------------------------------


def _sampling(
    request: schema.OllamaRequest,
    json_schema: str | None,
    max_reasoning_tokens: int | None,
    limits: Limits,
) -> SamplingParams:
    options = request.options or schema.ModelOptions()
    return SamplingParams(
        max_tokens=max_tokens_or_default(_max_tokens(options.num_predict), limits),
        temperature=options.temperature,
        top_p=None if options.top_p is None else max(options.top_p, _MIN_TOP_P),
        seed=None if options.seed == -1 else options.seed,
        stop=stop_strings(options.stop, "options.stop", limits),
        top_k=None if options.top_k is None else max(options.top_k, 0),
        min_p=options.min_p,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        repetition_penalty=options.repeat_penalty,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        json_schema=json_schema,
        max_reasoning_tokens=max_reasoning_tokens,
    )


def _max_tokens(num_predict: int | None) -> int | None:
    """The limit on an answer's tokens; None, the default, also for 0 and -1; none for -2."""
    if num_predict == _FILL_CONTEXT:
        return INT32_MAX
    return num_predict if num_predict is not None and num_predict > 0 else None


def _schema(request: schema.OllamaRequest, limits: Limits) -> str | None:
    """The JSON schema of `format`. Raises InvalidRequest."""
    match request.format:
        case "json":
            return ANY_OBJECT
        case dict() as given:
            return schema_text(given, limits, "format")
    return None


# ---- fields without effect ---------------------------------------------------------------


def _ignored_fields(
    fields: dict[str, Any], request: schema.OllamaRequest, model: KnownModel, context: Context
) -> IgnoredFields:
    """Paths of fields without effect, such as `options.num_ctx`; `request` was made of `fields`."""
    ignored = IgnoredFields()
    if model.stays_loaded or not context.is_admin:
        ignored.add("keep_alive", request.keep_alive)
    if not request.logprobs:
        ignored.add("top_logprobs", request.top_logprobs or None)
    if not model.can_reason:
        ignored.add("think", request.think)
    ignored.add_unread(fields, request)
    if isinstance(request, schema.OllamaChatRequest):
        for message in request.messages or ():
            _add_misplaced(message, ignored)
    return ignored


def _add_misplaced(message: schema.ChatMessage, ignored: IgnoredFields) -> None:
    if message.tool_name and message.name != message.tool_name:
        ignored.add("messages[].name", message.name)
    for name, role in _ROLE_OF_FIELD.items():
        if message.role != role:
            ignored.add(f"messages[].{name}", getattr(message, name))
