"""Requests of each dialect, and possible values, for tests of hostile requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.unit.api import requests as openai
from tests.unit.api.dialects.anthropic import steps as anthropic
from tests.unit.api.dialects.responses import requests as responses
from vlm_server.api.dialects.anthropic import errors as anthropic_errors
from vlm_server.api.dialects.anthropic.parse import parse_message
from vlm_server.api.dialects.anthropic.schema import MessagesRequest
from vlm_server.api.dialects.ollama.parse import (
    parse_chat,
    parse_generate,
)
from vlm_server.api.dialects.ollama.render import encode_error as encode_ollama_error
from vlm_server.api.dialects.ollama.schema import (
    ChatMessage,
    ModelOptions,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from vlm_server.api.dialects.openai import schema as openai_schema
from vlm_server.api.dialects.openai.completions import CompletionRequest
from vlm_server.api.dialects.openai.completions import parse_completion as read_completion
from vlm_server.api.dialects.openai.parse import parse_chat as read_openai
from vlm_server.api.dialects.responses import items
from vlm_server.api.dialects.responses import schema as responses_schema
from vlm_server.api.dialects.responses.parse import parse_response
from vlm_server.api.http import errors
from vlm_server.api.parsing.parsed_request import Parse
from vlm_server.errors import RequestError

Json = dict[str, Any]
Strategy = st.SearchStrategy[Any]

SCHEMA: Json = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
LONG_NAME = "x" * 900
FILE_NAME = f"sha256:{'0' * 64}"


@dataclass(frozen=True, repr=False)
class Hostile:
    """A dialect, as a client meets it that sends nonsense.

    whole: a request with most of what there is. plain: one without media, and imaged: one with.
    fields: the names of what stands beside the conversation. requests: those that are nearly right.
    anything: any JSON, of the dialect's words. longest: characters that a message may have.
    """

    name: str
    route: str
    parse: Parse
    encode_error: Callable[[RequestError], bytes]
    whole: Json
    plain: Json
    with_image: Json
    fields: tuple[str, ...]
    requests: Strategy
    anything: Strategy
    longest: int = 300

    def __str__(self) -> str:
        return self.name


def anything_of(*words: str, names: tuple[str, ...] = ()) -> Strategy:
    """Any JSON, with these words among its texts and these names among its fields."""
    known = ["user", "\ud800", "`", openai.PNG_URL, FILE_NAME, *words]
    word = st.text(max_size=12) | st.sampled_from(known)
    name = st.sampled_from(names) | word if names else word
    scalar = (
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False)
        | word
        | st.just("s" * 5000)
    )
    return st.recursive(
        scalar,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(name, inner, max_size=4),
        max_leaves=8,
    )


def with_some(body: Strategy, fields: tuple[str, ...], anything: Strategy) -> Strategy:
    """`body` with arbitrary values in a few fields: with most wrong, the first would decide."""
    few = st.dictionaries(st.sampled_from((*fields, "more")), anything, max_size=4)
    return st.builds(lambda base, more: base | more, body, few)


def names_of(struct: type[msgspec.Struct], *but: str) -> tuple[str, ...]:
    fields = (field.encode_name for field in msgspec.structs.fields(struct))
    return tuple(name for name in fields if name not in but)


WORD = st.text(max_size=12) | st.sampled_from(["user", "text", "\ud800", "`", openai.PNG_URL])
MODEL = st.just("demo") | WORD


# ---- OpenAI's chat completions, and completions ----------------------------------------


def _chat() -> Hostile:
    anything = anything_of("text", "image_url")
    part = st.sampled_from([openai.text(), openai.image_part(), {"type": "text"}])
    part |= st.fixed_dictionaries(
        {"type": WORD | st.sampled_from(["image_url", "video_url", "video", "file"])},
        optional=dict.fromkeys(
            ("text", "image_url", "video_url", "video", "file", "fps", "start", "num_frames"),
            anything,
        ),
    )
    call = st.fixed_dictionaries(
        {"id": st.just("1"), "type": st.just("function")},
        optional={"function": st.fixed_dictionaries({"name": WORD, "arguments": anything})},
    )
    message = st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool", "robot"]),
            "content": st.lists(part, max_size=3) | anything,
        },
        optional={
            "name": anything,
            "tool_calls": st.lists(call, max_size=3) | anything,
            "tool_call_id": st.just("1") | anything,
            LONG_NAME: anything,
        },
    )
    known = names_of(openai_schema.ChatRequest, "model", "messages")
    fields = (*known, *sorted(openai_schema.HARMLESS), *openai_schema.NEUTRAL)
    return Hostile(
        "chat",
        openai.ROUTE,
        read_openai,
        errors.encode_openai,
        whole=openai.chat(
            {"role": "system", "content": "Be brief."},
            openai.user(openai.text(), openai.image_part()),
            openai.assistant(openai.called("1", arguments='{"x": 1}'), reasoning_content="Hm."),
            openai.result("1", openai.text(), openai.image_part()),
            tools=[openai.tool(description="Looks.", parameters=SCHEMA, strict=True)],
            tool_choice={"type": "function", "function": {"name": "f"}},
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            stop=["x"],
            logit_bias={"5": 1},
            logprobs=True,
            top_logprobs=2,
            n=1,
            seed=1,
            temperature=1,
            stream=False,
            mm_processor_kwargs={"max_pixels": 10_000},
            chat_template_kwargs={"enable_thinking": True},
        ),
        plain=openai.chat(openai.user(openai.text())),
        with_image=openai.chat(openai.user(openai.text(), openai.image_part())),
        fields=fields,
        requests=with_some(
            st.fixed_dictionaries(
                {"model": MODEL, "messages": st.lists(message, max_size=3) | anything}
            ),
            fields,
            anything,
        ),
        anything=anything,
    )


def _completions() -> Hostile:
    anything = anything_of()
    fields = names_of(CompletionRequest, "model", "prompt")
    return Hostile(
        "completions",
        "/v1/completions",
        read_completion,
        errors.encode_openai,
        whole={
            "model": "demo",
            "prompt": [5, 6],
            "max_tokens": 5,
            "stop": ["x"],
            "logprobs": 1,
            "n": 1,
            "seed": 1,
            "temperature": 1,
            "stream": False,
            "response_format": {"type": "json_object"},
        },
        plain={"model": "demo", "prompt": "hi"},
        with_image={},
        fields=fields,
        requests=with_some(
            st.fixed_dictionaries({"model": MODEL, "prompt": WORD | anything}), fields, anything
        ),
        anything=anything,
    )


# ---- OpenAI's responses ------------------------------------------------------------------

_ITEM_NAMES = (
    *("type", "role", "content", "output", "call_id", "name", "arguments", "id", "status"),
    *("text", "image_url", "summary", "format", "schema", "mode", "tools", "effort", "phase"),
)
_ITEM_TYPES = (
    *("message", "function_call", "function_call_output", "reasoning", "input_text", "refusal"),
    *("input_image", "output_text", "reasoning_text", "function", "allowed_tools", "json_schema"),
    *sorted(items.UNSUPPORTED_ITEMS | items.UNSUPPORTED_PARTS),
)


def _responses() -> Hostile:
    anything = anything_of("{}", *_ITEM_TYPES, names=_ITEM_NAMES)
    part = st.fixed_dictionaries(
        {"type": st.sampled_from(_ITEM_TYPES)},
        optional=dict.fromkeys(("text", "refusal", "image_url", "detail", "annotations"), anything),
    )
    content = st.lists(part, max_size=3) | anything
    word = WORD | st.sampled_from(["{}", *_ITEM_TYPES])
    item = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(_ITEM_TYPES) | anything,
            "role": st.sampled_from(["user", "assistant", "developer"]) | anything,
            "content": content,
            "output": content,
            "call_id": word,
            "name": word,
            "arguments": word,
            "id": anything,
            LONG_NAME: anything,
        },
    )
    between = st.lists(item, min_size=1, max_size=3).map(
        lambda odd: [openai.user("U"), *odd, openai.user("U")]
    )
    known = names_of(responses_schema.ResponsesRequest, "model", "input")
    fields = (*known, *sorted(responses_schema.HARMLESS), *responses_schema.NEUTRAL)
    image = {"type": "input_image", "image_url": openai.PNG_URL}
    call = {"type": "function_call", "call_id": "1", "name": "a", "arguments": '{"x": 1}'}
    result = {"type": "function_call_output", "call_id": "1", "output": [image]}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": []}
    return Hostile(
        "responses",
        responses.ROUTE,
        parse_response,
        errors.encode_openai,
        whole=responses.asking(
            [
                openai.user({"type": "input_text", "text": "U"}, image),
                {**thought, "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
                call,
                result,
            ],
            instructions="Be brief.",
            tools=[responses.tool("a", description="Looks.", strict=True)],
            tool_choice={"type": "function", "name": "a"},
            text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            reasoning={"effort": "low"},
            metadata={"a": "b"},
            max_output_tokens=9,
            temperature=1,
            store=False,
            stream=False,
        ),
        plain=responses.asking([openai.user("U")]),
        with_image=responses.asking([openai.user(image)], tools=[responses.tool("a")]),
        fields=fields,
        requests=st.one_of(
            with_some(
                st.fixed_dictionaries(
                    {"model": st.just("demo"), "input": st.lists(item, max_size=4) | anything}
                ),
                fields,
                anything,
            ),
            between.map(responses.asking),
        ),
        anything=anything,
    )


# ---- Anthropic's messages ----------------------------------------------------------------


def _messages() -> Hostile:
    types = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")
    names = ("type", "text", "source", "data", "media_type", "id", "name", "input", "content")
    anything = anything_of(*types, names=(*names, "tool_use_id", "thinking", "signature"))
    block = st.sampled_from([anthropic.text(), anthropic.IMAGE_BLOCK, anthropic.call()])
    block |= st.fixed_dictionaries(
        {"type": st.sampled_from(types)}, optional=dict.fromkeys((*names[1:], LONG_NAME), anything)
    )
    message = st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "robot"]),
            "content": st.lists(block, max_size=3) | anything,
        },
        optional={LONG_NAME: anything},
    )
    fields = (*names_of(MessagesRequest, "model", "messages"), "thread", "metadata")
    computer = {"type": "computer_20251124", "name": "c"}
    return Hostile(
        "messages",
        anthropic.ROUTE,
        parse_message,
        anthropic_errors.encode,
        whole=anthropic.request(
            openai.user(anthropic.text(), anthropic.IMAGE_BLOCK),
            anthropic.assistant(
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                anthropic.text(),
                anthropic.call(screen=1),
            ),
            openai.user(anthropic.result(anthropic.text(), anthropic.IMAGE_BLOCK)),
            system=[anthropic.text("Be brief.")],
            tools=[anthropic.LOOK, {**computer, "display_width_px": 9, "display_height_px": 9}],
            tool_choice={"type": "tool", "name": "look"},
            thinking={"type": "enabled", "budget_tokens": 9},
            output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
            stop_sequences=["x"],
            temperature=1,
            stream=False,
        ),
        plain=anthropic.request(),
        with_image=anthropic.request(openai.user(anthropic.IMAGE_BLOCK)),
        fields=fields,
        requests=with_some(
            st.fixed_dictionaries(
                {"model": MODEL, "messages": st.lists(message, max_size=3) | anything}
            ),
            fields,
            anything,
        ),
        anything=anything,
    )


# ---- Ollama's ----------------------------------------------------------------------------

_FUNCTION: Json = {"name": "f", "description": "Looks.", "parameters": SCHEMA}
_OPTIONS: Json = {"temperature": 1, "seed": 1, "num_predict": 9, "stop": ["x"], "num_ctx": 4096}


def _ollama(*, is_chat: bool) -> Hostile:
    anything = anything_of("json", "low", anthropic.PNG)
    word = WORD | st.sampled_from(["json", "low", anthropic.PNG])
    odd_call = st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": word}, optional={"arguments": anything, "x": anything}
            )
        },
        optional={"id": word},
    )
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"])},
        optional={
            **dict.fromkeys(names_of(ChatMessage, "role", "content"), anything),
            "content": word,
            "images": st.lists(word, max_size=2),
            "tool_calls": st.lists(odd_call, max_size=2),
            LONG_NAME: anything,
        },
    )
    options = st.fixed_dictionaries(
        {}, optional=dict.fromkeys((*names_of(ModelOptions), "num_ctx"), anything)
    )
    struct = OllamaChatRequest if is_chat else OllamaGenerateRequest
    fields = names_of(struct, "model", "messages" if is_chat else "prompt")
    conversation: Json = {"messages": st.lists(message, max_size=3) | anything}
    user_turn = {"role": "user", "content": "hi"}
    call: Json = {"function": {"name": "f", "arguments": {"x": 1}}}
    history = [
        {"role": "system", "content": "Be brief."},
        {**user_turn, "images": [anthropic.PNG]},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_name": "f"},
    ]
    tools = [{"type": "function", "function": _FUNCTION}]
    question: Json = {"prompt": "hi", "system": "Be brief."}
    request: Json = {"messages": history, "tools": tools} if is_chat else question
    images = {"images": [anthropic.PNG]}
    return Hostile(
        "ollama chat" if is_chat else "ollama generate",
        "/api/chat" if is_chat else "/api/generate",
        parse_chat if is_chat else parse_generate,
        encode_ollama_error,
        whole={
            "model": "demo",
            **request,
            **({} if is_chat else images),
            "format": SCHEMA,
            "think": "low",
            "keep_alive": "5m",
            "options": _OPTIONS,
            "stream": False,
        },
        plain={"model": "demo", **({"messages": [user_turn]} if is_chat else {"prompt": "hi"})},
        with_image={
            "model": "demo",
            **({"messages": [{**user_turn, **images}]} if is_chat else {"prompt": "hi", **images}),
        },
        fields=fields,
        requests=with_some(
            st.fixed_dictionaries(
                {"model": MODEL, **(conversation if is_chat else {"prompt": word})},
                optional={"options": options},
            ),
            fields,
            anything,
        ),
        anything=anything,
        longest=600,
    )


DIALECTS = (
    _chat(),
    _completions(),
    _responses(),
    _messages(),
    _ollama(is_chat=True),
    _ollama(is_chat=False),
)
