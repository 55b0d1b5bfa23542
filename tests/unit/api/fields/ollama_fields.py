"""Fields of Ollama's `/api/chat` and `/api/generate`."""

from __future__ import annotations

import base64
from typing import Any

from tests.support.image_files import image_file
from tests.unit.api.dialects.ollama.test_fields import IGNORED_OPTIONS, chat, generate
from tests.unit.api.fields.field import (
    Dialect,
    Field,
    Reading,
    answers,
    ignored,
    refused,
    unknown_elsewhere,
    unknown_in_messages,
    works,
)
from tests.unit.api.fields.openai_fields import OF_OTHERS, SCHEMA
from tests.unit.api.requests import tool, user
from vlm_server.api.dialects.ollama.schema import OllamaChatRequest, OllamaGenerateRequest

PNG = base64.b64encode(image_file("PNG")).decode()
WITH_TOOL = chat(tools=[tool("f", description="F.", parameters=SCHEMA)])
FIRST = {"function": {"name": "f", "arguments": {"x": 1}}, "id": "1"}
SECOND = {"function": {"name": "g", "arguments": {}}, "id": "2"}


def called(*calls: dict[str, Any], **result: Any) -> dict[str, Any]:
    """A request with `calls` in its history, and one result."""
    assistant = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    return chat(user("hi"), assistant, {"role": "tool", "content": "x", **result})


CALLED = called(FIRST)
CALLED_TWICE = called(FIRST, SECOND)
ANSWERED = chat(user("hi"), {"role": "assistant", "content": "Yes?"}, user("so?"))


def shared(usual: dict[str, Any]) -> tuple[Field, ...]:
    """The fields of both routes."""
    scored = {**usual, "logprobs": True}
    return (
        works("model", "model", "other", fails=404),
        answers("stream", "stream", True),
        works("format", "format", "json"),
        works("schema", "format", SCHEMA, on={**usual, "format": {"type": "object"}}),
        works("most tokens", "options.num_predict", 9),
        works("temperature", "options.temperature", 0.5),
        works("top p", "options.top_p", 0.5),
        works("top k", "options.top_k", 5),
        works("min p", "options.min_p", 0.5),
        works("seed", "options.seed", 7),
        works("stop strings", "options.stop", ["x"]),
        works("repetition penalty", "options.repeat_penalty", 1.5),
        works("presence penalty", "options.presence_penalty", 1),
        works("frequency penalty", "options.frequency_penalty", 1),
        works("on, off", "think", True),
        works("effort", "think", "low", on={**usual, "think": True}),
        works("log probabilities", "logprobs", True),
        works("likeliest tokens", "top_logprobs", 5, on=scored),
        ignored("staying loaded", "keep_alive", "5m",
                where="for a pinned model, or without an admin key"),
        *(ignored(_concept(name), f"options.{name}", value)
          for name, value in IGNORED_OPTIONS.items()),
        ignored("at the top", "colour", "red", title="any"),
        *unknown_elsewhere(Reading.IGNORED, ("options", None)),
    )  # fmt: skip


def _concept(option: str) -> str:
    if option == "num_ctx":
        return "size of the context"
    is_sampler = option.startswith(("mirostat", "tfs", "typical", "repeat", "penalize"))
    return "other samplers" if is_sampler else "engine's options"


CHAT = Dialect(
    title="Ollama chat",
    route="/api/chat",
    structs=(OllamaChatRequest,),
    usual=chat(),
    fields=(
        *shared(chat()),
        works("conversation or prompt", "messages", [user("other")]),
        works("role", "messages[].role", "system", on=chat(user("hi"), user("ho"))),
        works("continuation", "messages[].role", "assistant", on=chat(user("hi"), user("ho")),
              title="a last message of the assistant"),
        works("text", "messages[].content", "other"),
        works("image", "messages[user].images", [PNG]),
        works("image", "messages[tool].images", [PNG], on=CALLED),
        works("thought", "messages[assistant].thinking", "Hm.", on=ANSWERED),
        ignored("thought", "messages[user].thinking", "Hm.", where=OF_OTHERS),
        works("call", "messages[assistant].tool_calls", [FIRST], on=ANSWERED),
        works("call", "messages[assistant].tool_calls[].id", "3", on=CALLED),
        works("call", "messages[assistant].tool_calls[].function.name", "h", on=CALLED),
        works("call", "messages[assistant].tool_calls[].function.arguments", {}, on=CALLED),
        ignored("call", "messages[user].tool_calls", [FIRST], where=OF_OTHERS),
        works("result of a call", "messages[tool].tool_call_id", "2", on=CALLED_TWICE),
        ignored("result of a call", "messages[user].tool_call_id", "2", where=OF_OTHERS),
        works("tool of a result", "messages[tool].tool_name", "g", on=CALLED_TWICE),
        works("tool of a result", "messages[tool].name", "g", on=CALLED_TWICE),
        ignored("tool of a result", "messages[user].tool_name", "g", where=OF_OTHERS),
        ignored("tool of a result", "messages[tool].name", "h", where="beside another `tool_name`",
                on=called(FIRST, SECOND, tool_name="g")),
        ignored("name of the speaker", "messages[user].name", "Ann", where=OF_OTHERS),
        works("tools", "tools", [tool("f")]),
        works("name", "tools[].function.name", "g", on=WITH_TOOL),
        works("description", "tools[].function.description", "G.", on=WITH_TOOL),
        works("parameters", "tools[].function.parameters", {}, on=WITH_TOOL),
        ignored("strict arguments", "tools[].function.strict", True, on=WITH_TOOL),
        refused("type", "tools[].type", "other", on=WITH_TOOL, neutral=("function", None)),
        refused("image", "messages[system].images", [PNG], where="of systems and assistants",
                on=chat({"role": "system", "content": "S"}, user("hi"))),
        *unknown_in_messages(
            ("messages[]", None),
            ("tools[]", WITH_TOOL),
            ("tools[].function", WITH_TOOL),
            ("messages[assistant].tool_calls[]", CALLED),
            ("messages[assistant].tool_calls[].function", CALLED),
        ),
    ),
)  # fmt: skip

GENERATE = Dialect(
    title="Ollama generate",
    route="/api/generate",
    structs=(OllamaGenerateRequest,),
    usual=generate(),
    fields=(
        *shared(generate()),
        works("conversation or prompt", "prompt", "other"),
        works("system prompt", "system", "Be brief."),
        works("image", "images", [PNG]),
        refused("text after the answer", "suffix", "x", neutral=("", None)),
        refused("template of the request's own", "template", "x", neutral=("", None)),
        refused("template of the request's own", "raw", True, neutral=(False, None)),
        ignored("earlier turns", "context", [1, 2]),
    ),
)
