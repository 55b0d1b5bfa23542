"""Fields of requests that several dialects have: types, bounds, and parsing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, structs
from msgspec.json import Decoder

from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.conversation import Conversation, Counts, DocumentSource
from vlm_server.api.parsing.ignored_fields import IgnoredFields, check_neutral, known_fields
from vlm_server.api.parsing.media.documents import PageOptions
from vlm_server.api.parsing.parsed_request import Context, ParsedRequest
from vlm_server.api.parsing.tools import ToolDefinition
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import (
    Message,
    Pooling,
    PoolingInput,
    SamplingParams,
    Submit,
    TemplateOptions,
    Tools,
)
from vlm_server.settings import Limits

Request = TypeVar("Request", bound=Struct)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TOP_LOGPROBS = 20
_LONGEST_SCHEME = 16
_AS_USUAL = TemplateOptions()

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Size = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
Seed = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
PageList = Annotated[str, Meta(max_length=1024, pattern="^[0-9, -]*$")]
"""Pages of a document: `1-3,7`."""
Dpi = Annotated[float, Meta(ge=10, le=1200)]
EFFORT_RULE = "must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'"
ImageDetail = Literal["auto", "low", "high", "original"]
"""`low` scales an image down; `high` and `original` scale a small one up."""


class Function(Struct):
    """A tool that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class StrictFunction(Function):
    strict: bool | None = None


class CalledFunction(Struct):
    """A call; `arguments` is an object, or its JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class NamedSchema(Struct):
    """A schema, enforced whether `strict` or not; `name` and `description` have no effect."""

    schema: dict[str, Any]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    strict: bool | None = None


def page_options(
    pages: str | None,
    dpi: float | None,
    max_pixels: int | None,
    include_text: bool | None,
    detail: Literal["auto", "low", "high"] | None = None,
) -> PageOptions:
    """The options of a document's part, with defaults for what it leaves out."""
    return PageOptions(pages or "", dpi, max_pixels, detail or "auto", bool(include_text))


def document_source(data: str, filename: str | None) -> DocumentSource:
    """A document's URL, or its base64, as OpenAI's clients send it."""
    is_url = ":" in data[:_LONGEST_SCHEME]
    return DocumentSource(data, title=filename or "", is_base64=not is_url)


def prepare(*schemas: type[Struct]) -> None:
    """Build msgspec's type information.

    Two threads that build it concurrently, at the first two requests, crash the process.
    """
    for schema in schemas:
        Decoder(schema)


def effective_fields(
    fields: dict[str, Any],
    schema: type[Struct],
    ignored: IgnoredFields,
    context: Context,
    *,
    harmless: Set[str] = frozenset(),
    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The fields of a body that `schema` reads; fields without effect go to `ignored`.

    harmless: fields accepted with any value. neutral: unsupported fields, each with its values
    without effect. Unknown fields stay, to be refused by name, if the server refuses them.
    Raises UnsupportedField.
    """
    for name, values in neutral.items():
        check_neutral(name, fields.get(name), values)
    for name in sorted(harmless & fields.keys()):
        ignored.add(name, fields[name])
    other_fields = {
        name: value
        for name, value in fields.items()
        if name not in neutral and name not in harmless
    }
    return known_fields(other_fields, schema, ignored, refuses=context.unknown_fields == "refuse")


def read_request(
    fields: dict[str, Any],
    schema: type[Request],
    rules: Mapping[str, str],
    context: Context,
    *,
    harmless: Set[str] = frozenset(),
    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> tuple[Request, IgnoredFields]:
    """The request of a body's `fields`, and those without effect: see `effective_fields`.

    Raises InvalidRequest, naming the field at fault by `rules`, and UnsupportedField.
    """
    ignored = IgnoredFields()
    effective = effective_fields(
        fields, schema, ignored, context, harmless=harmless, neutral=neutral
    )
    request = json_body.convert(effective, schema, rules)
    ignored.add_unread(effective, request)
    return request, ignored


def tool_definitions(functions: Iterable[Function], param: str) -> list[ToolDefinition]:
    """The tools of a request; `param` is the path of each, with `{}` for its number."""
    return [
        ToolDefinition(
            function.name,
            param.format(i),
            function.description,
            function.parameters,
            strict=isinstance(function, StrictFunction) and bool(function.strict),
        )
        for i, function in enumerate(functions)
    ]


def ignore_labels(schema: NamedSchema | None, path: str, ignored: IgnoredFields) -> None:
    """Report a schema's name and description, which the model does not get."""
    if schema is None:
        return
    ignored.add(f"{path}.name", schema.name)
    ignored.add(f"{path}.description", schema.description)
    if schema.strict is False:
        ignored.add(f"{path}.strict")


def check_counts(
    num_messages: int,
    contents: Iterable[object],
    limits: Limits,
    *,
    image: type[Struct] | tuple[type[Struct], ...],
    video: type[Struct] | tuple[type[Struct], ...] = (),
    num_documents: int = 0,
    param: str = "messages",
) -> None:
    """Raises InvalidRequest for more messages, parts, images or videos than `limits` allow.

    contents: of the messages, each a text or a list of parts. image, video: types of parts.
    num_documents: parts of the type `image` that are none.
    """
    all_contents = list(contents)
    parts = [part for content in all_contents if isinstance(content, list) for part in content]
    Counts(
        messages=num_messages,
        parts=len(parts) + sum(isinstance(content, str) for content in all_contents),
        images=sum(isinstance(part, image) for part in parts) - num_documents,
        videos=sum(isinstance(part, video) for part in parts),
    ).check(limits, param)


def submit_of(
    conversation: Conversation,
    context: Context,
    sampling: SamplingParams,
    tools: Tools | None = None,
    template: TemplateOptions = _AS_USUAL,
    prediction: str = "",
) -> Submit:
    """The engine's request for the next message of a conversation."""
    return Submit(
        request_id=context.request_id,
        messages=tuple(conversation.messages),
        images=tuple(conversation.images),
        sampling=sampling,
        videos=tuple(conversation.videos),
        cache_salt=context.cache_salt,
        client=context.client,
        tools=tools,
        template=template,
        prediction=prediction,
    )


def submit_prompt(
    prompt: str | tuple[int, ...], context: Context, sampling: SamplingParams
) -> Submit:
    """The engine's request for the continuation of a prompt without a template."""
    submit = submit_of(Conversation.of(context), context, sampling)
    return structs.replace(submit, prompt=prompt)


def check_prompt(text: str, context: Context) -> str:
    """`text`, the field `prompt`. Raises InvalidRequest beyond `limits.max_text_bytes`."""
    limit = context.limits.max_text_bytes
    if json_body.utf8_length(text, "prompt") > limit:
        message = f"At most {limit} bytes of text are allowed (limits.max_text_bytes)."
        raise InvalidRequest(message, "prompt")
    return text


def to_count_request(request: ParsedRequest) -> ParsedRequest:
    """`request` as a request to count tokens, without an answer."""
    submit = structs.replace(request.submit, count_only=True)
    return structs.replace(request, submit=submit, stream=False, options=b"")


def submit_pooling(
    inputs: tuple[PoolingInput, ...],
    conversation: Conversation,
    context: Context,
    pooling: Pooling,
    messages: Sequence[Message] = (),
) -> Submit:
    """The engine's request for vectors, scores or decisions, which are about the `messages`."""
    submit = submit_of(conversation, context, SamplingParams())
    return structs.replace(submit, messages=tuple(messages), pooling=pooling, inputs=inputs)
