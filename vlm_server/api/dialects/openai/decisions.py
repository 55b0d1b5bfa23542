"""`POST /v1/decisions`: questions with given options about a conversation, answered unwritten.

The form of bodies and answers is mlx-vlm's; `messages` and pixel limits are those of chats.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta, msgpack

from vlm_server.api.dialects.answer_parts import media_usage
from vlm_server.api.dialects.fields import effective_fields, prepare, submit_pooling
from vlm_server.api.dialects.openai import schema
from vlm_server.api.dialects.openai.embeddings import usage_json
from vlm_server.api.dialects.openai.messages import parse_messages
from vlm_server.api.dialects.openai.pooling_inputs import MAX_VALUES
from vlm_server.api.dialects.openai.questions import (
    TYPE_RULE,
    Asked,
    Input,
    Question,
    answer_of,
    read_question,
)
from vlm_server.api.parsing import json_body
from vlm_server.api.parsing.common_fields import model_wanted
from vlm_server.api.parsing.conversation import Conversation, Counts
from vlm_server.api.parsing.ignored_fields import IgnoredFields, safe_name
from vlm_server.api.parsing.media.video_options import MediaOptions
from vlm_server.api.parsing.parsed_request import Body, Context, ParsedRequest
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import (
    ContentPart,
    Finished,
    Message,
    Pooling,
    PoolingInput,
    TextPart,
)
from vlm_server.settings import Limits

DIALECT = "openai-decisions"
NEUTRAL: dict[str, tuple[Any, ...]] = {"audio": (None,)}
"""mlx-vlm's fields that are not supported, with their values without effect."""
RULES = {**schema.RULES, "type": TYPE_RULE}


class DecisionRequest(MediaOptions, forbid_unknown_fields=True, kw_only=True):
    """A request; `state` and `images` are one user's message, in place of `messages`."""

    questions: Annotated[dict[str, Question], Meta(min_length=1)]
    state: str | dict[str, Any] | list[Any] | None = None
    images: list[str] | None = None
    messages: list[schema.ChatMessage] | None = None
    model: str | None = None


prepare(DecisionRequest)


def parse_decisions(body: Body, context: Context) -> ParsedRequest:
    """The request in `body`. Raises RequestError, BytesNeeded and NeedsProcess."""
    ignored = IgnoredFields()
    fields = effective_fields(
        json_body.parse_object(body, MAX_VALUES),
        DecisionRequest,
        ignored,
        context,
        harmless=schema.HARMLESS,
        neutral=NEUTRAL,
    )
    check_questions(fields.get("questions"))
    request = json_body.convert(fields, DecisionRequest, RULES)
    ignored.add_unread(fields, request)
    model = model_wanted(request.model, context)
    conversation = Conversation.of(context, "questions")
    conversation.set_media_options(request)
    asked, inputs = read_questions(request.questions, conversation)
    _fill(conversation, request, ignored)
    conversation.check_complete()
    messages = conversation.messages
    submit = submit_pooling(inputs, conversation, context, Pooling("decide"), messages)
    options = msgpack.encode(asked)
    return ParsedRequest(model.name, submit, stream=False, options=options, ignored=ignored.names)


def check_questions(questions: Any) -> None:
    """Raises InvalidRequest with the name of the question at fault."""
    for name, question in questions.items() if isinstance(questions, dict) else ():
        try:
            json_body.convert(question, Question, RULES)
        except InvalidRequest as error:
            param = ".".join(filter(None, (param_of(name), error.param)))
            message = error.message.replace(f"`{error.param}`", f"`{param}`")
            raise type(error)(message, param) from None


def param_of(name: str) -> str:
    return safe_name(f"questions.{name}")


def read_questions(
    questions: dict[str, Question], conversation: Conversation
) -> tuple[list[Asked], tuple[PoolingInput, ...]]:
    """The questions, and the inputs of all. Raises InvalidRequest for too many options."""
    asked, inputs, limits = list[Asked](), list[PoolingInput](), conversation.limits
    num_options = 0
    for name, question in questions.items():
        param = param_of(name)
        read, its_inputs = read_question(name, question, param)
        num_options += sum(len(each.options) for each in its_inputs)
        _check_number(num_options, limits)
        asked.append(read)
        inputs += (_pooling_input(each, conversation, param) for each in its_inputs)
    return asked, tuple(inputs)


def _check_number(num_options: int, limits: Limits) -> None:
    if num_options > limits.max_options:
        raise InvalidRequest(
            f"At most {limits.max_options} options are allowed, over all questions "
            "(limits.max_options); yes or no are four, in two spellings each.",
            "questions",
        )


def _pooling_input(each: Input, conversation: Conversation, param: str) -> PoolingInput:
    for option in each.options:
        conversation.count_text(option, param)
    message = Message("user", (conversation.text(each.text, param),), param=param)
    return PoolingInput(
        (message,), param=param, options=each.options, num_spellings=each.num_spellings
    )


def _fill(conversation: Conversation, request: DecisionRequest, ignored: IgnoredFields) -> None:
    """Fill `conversation` with what the questions are about. Raises InvalidRequest."""
    state, urls = request.state, request.images or []
    if request.messages is not None:
        if state is not None or urls:
            raise InvalidRequest("`messages` stand in place of `state` and `images`.", "messages")
        parse_messages(request.messages, conversation, ignored)
        return
    if state is None and not urls:
        raise InvalidRequest("`state`, `images` or `messages` must be given.", "state")
    Counts(1, len(urls) + (state is not None), len(urls), 0).check(conversation.limits, "images")
    parts: list[ContentPart] = [
        conversation.image(url, f"images[{i}]") for i, url in enumerate(urls)
    ]
    if state is not None:
        text = state
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False, indent=2)
        parts.append(conversation.text(text, "state"))
    if parts == [TextPart("")]:
        raise InvalidRequest("`state` is empty.", "state")
    conversation.add(Message("user", tuple(parts)), "state" if not urls else "images")


def encode_decisions(_: str, model: str, options: bytes, finished: Finished) -> bytes:
    """mlx-vlm's answer, with OpenAI's usage and ours beside its own."""
    asked = msgpack.decode(options, type=list[Asked])
    answers, decisions = dict[str, Any](), list(finished.decisions)
    for question in asked:
        its_decisions = decisions[: question.num_inputs]
        del decisions[: question.num_inputs]
        answers[question.name] = answer_of(question, its_decisions)
    usage = usage_json(finished) | media_usage(finished)
    usage |= {"input_tokens": finished.usage.prompt_tokens, "output_tokens": 0}
    return msgspec.json.encode({"model": model, "answers": answers, "usage": usage})
