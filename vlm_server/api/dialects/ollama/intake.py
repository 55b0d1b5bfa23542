"""From the body of a request to `/api/chat` or `/api/generate` to a `Submit`, with limits checked.

Runs on a thread or in an intake process: see `http.intake`.
"""

from __future__ import annotations

from vlm_server.api.dialects.ollama import schema
from vlm_server.api.dialects.ollama.ignored import ignored_fields
from vlm_server.api.dialects.ollama.messages import pictures_and_text, read_messages
from vlm_server.api.dialects.ollama.models import keep_alive, model_name
from vlm_server.api.dialects.ollama.options import AnswerOptions, encode_options
from vlm_server.api.dialects.ollama.sampling import read_sampling, read_schema
from vlm_server.api.dialects.ollama.schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    Request,
    Tool,
)
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import ConstraintFields, check_constraints
from vlm_server.api.parsing.conversation import Conversation, Counts
from vlm_server.api.parsing.effort import variables_text
from vlm_server.api.parsing.leniency import IgnoredFields
from vlm_server.api.parsing.parsed_request import Body, Context, KnownModel, ParsedRequest
from vlm_server.api.parsing.tools import ToolChoice, ToolDefinition, read_tools
from vlm_server.errors import Forbidden, UnsupportedField
from vlm_server.protocol import (
    Message,
    SamplingParams,
    Submit,
    TemplateOptions,
    TextPart,
    Tools,
)

CHAT = "ollama.chat"
GENERATE = "ollama.generate"
_FIELDS = ConstraintFields("format", continued="messages", calls="tools")

_OF_QUESTIONS = frozenset({"format", "logprobs", "options", "system", "think", "tools"})
"""Fields without effect where nothing is asked."""


def read_chat(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError, and BytesNeeded for URLs in `images`."""
    return _chat(*_read(body, OllamaChatRequest, context), context)


def read_chat_text(body: Body, context: Context) -> ParsedRequest | None:
    """The request in `body`; None if it has images. Raises RequestError."""
    request, model, ignored = _read(body, OllamaChatRequest, context)
    has_images = any(message.images for message in request.messages or ())
    return None if has_images else _chat(request, model, ignored, context)


def read_generate(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError, and BytesNeeded for URLs in `images`."""
    return _generate(*_read(body, OllamaGenerateRequest, context), context)


def read_generate_text(body: Body, context: Context) -> ParsedRequest | None:
    """The request in `body`; None if it has images. Raises RequestError."""
    request, model, ignored = _read(body, OllamaGenerateRequest, context)
    return None if request.images else _generate(request, model, ignored, context)


def _read(
    body: Body, kind: type[schema.R], context: Context
) -> tuple[schema.R, KnownModel, IgnoredFields]:
    fields = json_body.parse_object(body)
    request = schema.convert(fields, kind)
    model = model_name.model_wanted(request.model, context.models)
    return request, model, ignored_fields(fields, request, model, context)


def _chat(
    request: OllamaChatRequest, model: KnownModel, ignored: IgnoredFields, context: Context
) -> ParsedRequest:
    messages = request.messages or []
    if not messages:
        return _nothing_asked(request, model, ignored, context)
    conversation = Conversation(context.limits, context.given)
    tools = _tools(request.tools or [], conversation)
    read_messages(messages, conversation)
    return _parsed_request(request, model, ignored, conversation, tools, context)


def _generate(
    request: OllamaGenerateRequest, model: KnownModel, ignored: IgnoredFields, context: Context
) -> ParsedRequest:
    for name in ("suffix", "template", "raw"):
        if getattr(request, name):
            raise UnsupportedField(f"`{name}` is not supported; leave it out.", name)
    images = request.images or []
    if not (request.prompt or images):
        return _nothing_asked(request, model, ignored, context)
    Counts(1, 2 + len(images), len(images), 0).check(context.limits, "images")
    conversation = Conversation(context.limits, context.given, text_param="prompt")
    if request.system:
        told = conversation.text(request.system, "system")
        conversation.add(Message("system", (told,)), "system")
    text = conversation.text(request.prompt or "", "prompt")
    asked = Message("user", pictures_and_text(images, "images", text, conversation))
    conversation.add(asked, "prompt")
    conversation.check_complete()
    return _parsed_request(request, model, ignored, conversation, None, context)


def _parsed_request(
    request: Request,
    model: KnownModel,
    ignored: IgnoredFields,
    conversation: Conversation,
    tools: Tools | None,
    context: Context,
) -> ParsedRequest:
    continues = _continues(conversation.messages[-1])
    json_schema = check_constraints(
        tools, read_schema(request, context.limits), _FIELDS, ignored, continues=continues
    )
    submit = Submit(
        request_id=context.request_id,
        messages=tuple(conversation.messages),
        images=tuple(conversation.images),
        sampling=read_sampling(request, json_schema, context.limits),
        cache_salt=context.cache_salt,
        client=context.client,
        tools=tools,
        template=_template(request, continues=continues),
    )
    options = encode_options(AnswerOptions(request.model or model.name))
    return ParsedRequest(
        model.name,
        submit,
        request.stream is not False,
        options,
        ignored.names,
        keep_alive_seconds=_keep_alive(request, context),
    )


def _nothing_asked(
    request: Request, model: KnownModel, ignored: IgnoredFields, context: Context
) -> ParsedRequest:
    """For clients that load a model before they ask it, or unload it. A pinned one stays.

    Raises Forbidden if the client may not unload it.
    """
    for name in sorted(_OF_QUESTIONS & set(request.__struct_fields__)):
        ignored.add(name, getattr(request, name))
    seconds = _keep_alive(request, context, unloads=True)
    options = encode_options(
        AnswerOptions(request.model or model.name, "load" if seconds != 0 else "unload")
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


def _keep_alive(request: Request, context: Context, *, unloads: bool = False) -> float | None:
    """How long the model stays loaded, for all who use it: only an admin key may say so.

    For other keys None, or Forbidden if the request only `unloads` the model.
    """
    seconds = keep_alive.seconds_of(request.keep_alive)
    if context.is_admin:
        return seconds
    if unloads and seconds == 0:
        raise Forbidden("Unloading a model needs a key with `admin = true`.", "keep_alive")
    return None


def _tools(tools: list[Tool], conversation: Conversation) -> Tools | None:
    definitions = [
        ToolDefinition(
            name=tool.function.name,
            param=f"tools[{i}].function",
            description=tool.function.description,
            parameters=tool.function.parameters,
        )
        for i, tool in enumerate(tools)
    ]
    return read_tools(definitions, ToolChoice(param="tools"), conversation)


def _template(request: Request, *, continues: bool) -> TemplateOptions:
    """A level of `think` is for templates that have levels."""
    level = request.think if isinstance(request.think, str) else None
    return TemplateOptions(
        enable_thinking=None if request.think is None else bool(request.think),
        variables=variables_text(level),
        continue_final=continues,
    )


def _continues(last: Message) -> bool:
    """Whether the answer goes on: where the assistant's last words end."""
    has_text = any(isinstance(part, TextPart) and part.text for part in last.content)
    return last.role == "assistant" and has_text and not last.tool_calls
