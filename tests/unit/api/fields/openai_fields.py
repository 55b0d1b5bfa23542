"""Fields of OpenAI's chat completions."""

from __future__ import annotations

from typing import Any

from tests.support import pdf, video_files
from tests.support.image_files import data_url, image_file
from tests.unit.api.fields import video_fields
from tests.unit.api.fields.field import (
    STORED_NAME,
    Dialect,
    Field,
    Reading,
    answers,
    ignored,
    refused,
    unknown_elsewhere,
    unknown_in_messages,
    uploaded,
    works,
)
from tests.unit.api.requests import assistant, called, chat, image_part, result, text, tool, user
from vlm_server.api.dialects.openai.schema import HARMLESS, NEUTRAL, ChatRequest

OTHER_PNG = data_url(image_file("PNG", (9, 7)))
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
SPEECH = {"id": "audio_1"}

STREAMED = {"stream": True}
WITH_TOOL = chat(tools=[tool("f", description="F.", parameters=SCHEMA)])
WITH_TOOLS = chat(tools=[tool("f"), tool("g")])
ASSISTANT = chat(user("hi"), {"role": "assistant", "content": "Yes?"}, user("so?"))
CALLED = chat(user("hi"), assistant(called("1", "f", '{"x": 1}')), result("1", "x"))
WITH_SHOT = chat(user("hi"), assistant(called("1")), result("1", image_part()))
WITH_IMAGE = chat(user(text(), image_part()))
WITH_FILE = chat(user(text(), {"type": "file", "file": {"file_id": STORED_NAME}}))
VIDEO_URL, OTHER_VIDEO_URL = (
    video_files.data_url(video_files.encode(video_files.noise(i, 3))) for i in (1, 2)
)
WITH_VIDEO = chat(user({"type": "video_url", "video_url": {"url": VIDEO_URL}}))
PDF_URL, OTHER_PDF_URL = (pdf.data_url(pdf.numbered(num)) for num in (2, 3))
WITH_PAPER, SHOT_PAPER = (
    chat(
        *messages,
        {"role": role, **more, "content": [{"type": "file", "file": {"file_data": PDF_URL}}]},
    )
    for role, messages, more in (
        ("user", (), {}),
        ("tool", (user("hi"), assistant(called("1"))), {"tool_call_id": "1"}),
    )
)
WITH_CLIP = chat(user({"type": "video", "video": VIDEO_URL}))
WITH_REFUSAL = chat(
    user("hi"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, user("o")
)
BEGUN = chat(user("Tell."), {"role": "assistant", "content": "Once"}, continue_final_message=True)
OF_OTHERS = "in other messages"
CHOICE = "tool_choice{allowed_tools}.allowed_tools"


def choosing(choice: Any) -> dict[str, Any]:
    return {**WITH_TOOLS, "tool_choice": choice}


def allowing(mode: str, name: str) -> dict[str, Any]:
    return choosing(
        {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name)]}}
    )


def formatted(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def matching(**fields: Any) -> dict[str, Any]:
    """A request for an answer that matches a schema."""
    named = {"name": "a", "schema": SCHEMA, **fields}
    return formatted("json_schema", json_schema=named)


FORMAT = "response_format{json_schema}.json_schema"

SAMPLING: tuple[Field, ...] = (
    works("model", "model", "other", fails=404),
    works("stop strings", "stop", ["x"]),
    works("fewest tokens", "min_tokens", 5),
    works("past the end", "ignore_eos", True),
    works("number of answers", "n", 2),
    works("temperature", "temperature", 0.5),
    works("top p", "top_p", 0.5),
    works("top k", "top_k", 5),
    works("min p", "min_p", 0.5),
    works("seed", "seed", 7),
    works("presence penalty", "presence_penalty", 1),
    works("frequency penalty", "frequency_penalty", 1),
    works("repetition penalty", "repetition_penalty", 1.5),
    works("bias of tokens", "logit_bias", {"5": 10}),
    answers("stream", "stream", True),
)
"""What chat completions and text completions have in common."""


def formats(usual: dict[str, Any]) -> tuple[Field, ...]:
    """`response_format`, of chat and text completions."""
    on = {**usual, "response_format": matching()}
    plain = {**usual, "response_format": {"type": "text"}}
    json = {**usual, "response_format": {"type": "json_object"}}
    return (
        works("format", "response_format", {"type": "json_object"}),
        works("schema", f"{FORMAT}.schema", {"type": "object"}, on=on),
        ignored("name, description", f"{FORMAT}.name", "b", on=on),
        ignored("name, description", f"{FORMAT}.description", "B.", on=on),
        ignored("strictness", f"{FORMAT}.strict", False, on=on, neutral=(True,)),
        refused("schema", "response_format{text}.json_schema", {}, on=plain, neutral=(None,),
                where="with other types"),
        refused("schema", "response_format{json_object}.json_schema", {}, on=json, neutral=(None,),
                where="with other types"),
    )  # fmt: skip


def streams(usual: dict[str, Any]) -> tuple[Field, ...]:
    """`stream_options`, of chat and text completions."""
    on = {**usual, **STREAMED}
    padding = "stream_options.include_obfuscation"
    return (
        answers("usage at the end", "stream_options.include_usage", True, on=on),
        works("usage in every chunk", "stream_options.continuous_usage_stats", True, on=on),
        ignored("padding", padding, True, on=on, neutral=(False,)),
    )


HARMLESS_FIELDS: tuple[Field, ...] = (
    ignored("metadata", "metadata", {"a": "b"}),
    ignored("user", "user", "me"),
    ignored("user", "safety_identifier", "me"),
    ignored("cache hints", "prompt_cache_key", "k"),
    ignored("cache hints", "prompt_cache_options", {"ttl": "1h"}),
    ignored("cache hints", "prompt_cache_retention", "24h"),
    ignored("cache hints", "cache_control", {"type": "ephemeral"}),
    ignored("moderation", "moderation", {"model": "m"}),
)

UNSUPPORTED: tuple[Field, ...] = (
    refused("storing", "store", True, neutral=(False, None)),
    refused("functions (legacy)", "functions", [{"name": "f"}], neutral=([], None)),
    refused("functions (legacy)", "function_call", {"name": "f"}, neutral=("none", "auto", None)),
    refused("audio, modalities", "modalities", ["text", "audio"], neutral=(["text"], None)),
    refused("audio, modalities", "audio", {"voice": "x"}, neutral=(None,)),
    refused("priority", "service_tier", "flex", neutral=("auto", "default", None)),
    refused("verbosity", "verbosity", "low", neutral=("medium", None)),
    refused("tools that servers run", "web_search_options", {}, neutral=(None,)),
)

TOOLS: tuple[Field, ...] = (
    works("tools", "tools", [tool("f")]),
    works("name", "tools[]{function}.function.name", "g", on=WITH_TOOL),
    works("description", "tools[]{function}.function.description", "G.", on=WITH_TOOL),
    works("parameters", "tools[]{function}.function.parameters", {}, on=WITH_TOOL),
    works("strict arguments", "tools[]{function}.function.strict", True, on=WITH_TOOL),
    ignored("cache marks", "tools[].cache_control", {"type": "ephemeral"}, on=WITH_TOOL),
    works("choice", "tool_choice", "required", on=WITH_TOOLS),
    works(
        "tool that must be called",
        "tool_choice{function}.function.name",
        "g",
        on=choosing(tool("f")),
    ),
    works("allowed tools", f"{CHOICE}.mode", "required", on=allowing("auto", "f")),
    works("allowed tools", f"{CHOICE}.tools[]{{function}}.function.name", "g",
          on=allowing("auto", "f")),
    works("parallel calls", "parallel_tool_calls", False, on=WITH_TOOLS),
)  # fmt: skip

THINKING: tuple[Field, ...] = (
    works("on, off", "thinking.type", "enabled", on=chat(thinking={"type": "auto"})),
    works("on, off", "reasoning.enabled", True),
    works("effort", "reasoning_effort", "low"),
    works("effort", "reasoning.effort", "low"),
    works("longest thought", "thinking.budget_tokens", 9, on=chat(thinking={"type": "enabled"})),
    works("longest thought", "reasoning.max_tokens", 9),
    works("variables of the template", "chat_template_kwargs", {"x": 1}),
    works("on, off", "chat_template_kwargs.enable_thinking", True),
)

MESSAGES: tuple[Field, ...] = (
    works("conversation or prompt", "messages", [user("other")]),
    works("role", "messages[].role", "system", on=chat(user("hi"), user("ho"))),
    works("text", "messages[].content", "other"),
    works("text", "messages[].content[]{text}.text", "other", on=chat(user(text()))),
    works("refusal", "messages[assistant].content[]{refusal}.refusal", "Never.", on=WITH_REFUSAL),
    works("refusal", "messages[assistant].refusal", "No.", on=ASSISTANT),
    ignored("refusal", "messages[user].refusal", "No.", where=OF_OTHERS),
    works("thought", "messages[assistant].reasoning_content", "Hm.", on=ASSISTANT),
    works("thought", "messages[assistant].reasoning", "Hm.", on=ASSISTANT),
    ignored("thought", "messages[user].reasoning_content", "Hm.", where=OF_OTHERS),
    ignored("thought", "messages[user].reasoning", "Hm.", where=OF_OTHERS),
    ignored("thought", "messages[assistant].reasoning", "Hm.",
            where="beside another `reasoning_content`",
            on=chat(user("hi"), {"role": "assistant", "content": "Yes?", "reasoning_content": "H"},
                    user("so?"))),
    works("call", "messages[assistant].tool_calls", [called("1")], on=ASSISTANT),
    works("call", "messages[assistant].tool_calls[]{function}.id", "2", on=CALLED),
    works("call", "messages[assistant].tool_calls[]{function}.function.name", "g", on=CALLED),
    works("call", "messages[assistant].tool_calls[]{function}.function.arguments", "{}", on=CALLED),
    ignored("call", "messages[user].tool_calls", [called("1")], where=OF_OTHERS),
    ignored("call", "messages[assistant].tool_calls[].index", 0, on=CALLED),
    works("result of a call", "messages[tool].tool_call_id", "2", on=CALLED),
    ignored("result of a call", "messages[user].tool_call_id", "2", where=OF_OTHERS),
    works("tool of a result", "messages[tool].name", "g", on=CALLED),
    ignored("name of the speaker", "messages[user].name", "Ann", where="of users and assistants"),
    ignored("name of the speaker", "messages[assistant].name", "Bob", on=ASSISTANT,
            where="of users and assistants"),
    refused("audio, modalities", "messages[].audio", SPEECH, on=ASSISTANT, neutral=(None,)),
    refused("functions (legacy)", "messages[].function_call", {"name": "f"}, on=ASSISTANT,
            neutral=(None,)),
    ignored("cache marks", "messages[].content[]{text}.cache_control", {"type": "ephemeral"},
            on=chat(user(text()))),
    ignored("what answers had", "messages[assistant].annotations", [{"type": "x"}], on=ASSISTANT),
    ignored("what answers had", "messages[assistant].parsed", {"x": 1}, on=ASSISTANT),
    ignored("what answers had", "messages[assistant].provider_specific_fields", {"x": 1},
            on=ASSISTANT),
    works("continuation", "continue_final_message", False, on=BEGUN, fails=400),
    refused("other parts", "messages[].content", [{"type": "input_audio", "input_audio": {}}],
            named="messages[].content[].type", title="`input_audio` and others"),
    refused("where the answer begins", "add_generation_prompt", False, neutral=(True, None)),
)  # fmt: skip

EXPECTED = chat(prediction={"type": "content", "content": "x"})
EXPECTED_PARTS = chat(prediction={"type": "content", "content": [{"type": "text", "text": "x"}]})
DRAFTS: tuple[Field, ...] = (
    works("drafts", "prediction", {"type": "content", "content": "x"}),
    works("drafts", "prediction.type", "text", on=EXPECTED, fails=400),
    works("drafts", "prediction.content", "y", on=EXPECTED),
    works("drafts", "prediction.content[]{text}.text", "y", on=EXPECTED_PARTS),
)

UNKNOWN_AT_THE_TOP = refused("at the top", "colour", "red", title="any")
UNKNOWN: tuple[Field, ...] = (
    UNKNOWN_AT_THE_TOP,
    *unknown_in_messages(
        ("messages[]", None),
        ("messages[].content[]{text}", chat(user(text()))),
        ("messages[].content[]{image_url}.image_url", WITH_IMAGE),
        ("messages[].content[]{file}", WITH_PAPER),
        ("messages[].content[]{file}.file", WITH_PAPER),
        ("messages[assistant].tool_calls[]{function}", CALLED),
        ("messages[assistant].tool_calls[]{function}.function", CALLED),
        ("tools[]{function}", WITH_TOOL),
        ("tools[]{function}.function", WITH_TOOL),
        ("tool_choice{function}", choosing(tool("f"))),
    ),
    *unknown_elsewhere(
        Reading.REFUSED,
        ("stream_options", chat(stream=True)),
        ("reasoning", None),
        ("thinking", chat(thinking={"type": "auto"})),
        ("prediction", EXPECTED),
        ("response_format{text}", chat(response_format={"type": "text"})),
        (FORMAT, chat(response_format=matching())),
    ),
)

IMAGE = "messages[].content[]{image_url}.image_url"
SHOT_IMAGE = "messages[tool].content[]{image_url}.image_url"
VIDEO = "messages[].content[]{video_url}.video_url"
FILE = "messages[].content[]{file}.file"
MEDIA: tuple[Field, ...] = (
    works("image", IMAGE, OTHER_PNG, on=WITH_IMAGE),
    works("image", f"{IMAGE}.url", OTHER_PNG, on=WITH_IMAGE),
    works("detail", f"{IMAGE}.detail", "low", on=WITH_IMAGE),
    works("image", f"{SHOT_IMAGE}.url", OTHER_PNG, on=WITH_SHOT),
    works("detail", f"{SHOT_IMAGE}.detail", "low", on=WITH_SHOT),
    works("image by id", "messages[].content[]{file}.file.file_id", uploaded, on=WITH_FILE),
    works("video", VIDEO, OTHER_VIDEO_URL, on=WITH_VIDEO),
    works("video", f"{VIDEO}.url", OTHER_VIDEO_URL, on=WITH_VIDEO),
    works("document", f"{FILE}.file_data", OTHER_PDF_URL, on=WITH_PAPER),
    works(
        "document", "messages[tool].content[]{file}.file.file_data", OTHER_PDF_URL, on=SHOT_PAPER
    ),
    works("name, title", f"{FILE}.filename", "report.pdf", on=WITH_PAPER),
    works("pages", f"{FILE}.pages", "2", on=WITH_PAPER),
    works("size of pages", f"{FILE}.dpi", 50, on=WITH_PAPER),
    works("size of pages", f"{FILE}.max_pixels", 5000, on=WITH_PAPER),
    works("text of pages", f"{FILE}.include_text", True, on=WITH_PAPER),
    works("bounds of the size", "mm_processor_kwargs.min_pixels", 5000, on=WITH_IMAGE),
    works("bounds of the size", "mm_processor_kwargs.max_pixels", 5000, on=WITH_IMAGE),
    works("video", "messages[].content[]{video}.video", [OTHER_PNG, OTHER_PNG], on=WITH_CLIP),
    *video_fields.of_part("messages[].content[]{video_url}", WITH_VIDEO),
    *video_fields.of_part(VIDEO, WITH_VIDEO),
    *video_fields.of_part("messages[].content[]{video}", WITH_CLIP),
    *video_fields.of_request(WITH_VIDEO),
)

CHAT = Dialect(
    title="OpenAI chat",
    route="/v1/chat/completions",
    structs=(ChatRequest,),
    usual=chat(),
    fields=(
        *SAMPLING,
        works("most tokens", "max_tokens", 9),
        works("most tokens", "max_completion_tokens", 9),
        works("log probabilities", "logprobs", True),
        *DRAFTS,
        works("likeliest tokens", "top_logprobs", 5, on=chat(logprobs=True)),
        *formats(chat()),
        *streams(chat()),
        *TOOLS,
        *THINKING,
        *MESSAGES,
        *MEDIA,
        *HARMLESS_FIELDS,
        *UNSUPPORTED,
        *UNKNOWN,
    ),
    more=HARMLESS | NEUTRAL.keys(),
)
