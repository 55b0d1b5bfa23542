"""Fields of OpenAI's Responses."""

from __future__ import annotations

from typing import Any

import httpx

from tests.unit.api.dialects.responses.requests import ROUTE, asking, tool
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
from tests.unit.api.fields.openai_fields import (
    OTHER_PDF_URL,
    OTHER_PNG,
    OTHER_VIDEO_URL,
    PDF_URL,
    SCHEMA,
    UNKNOWN_AT_THE_TOP,
    VIDEO_URL,
)
from tests.unit.api.requests import PNG_URL, user
from vlm_server.api.dialects.responses.schema import HARMLESS, LOGPROBS, NEUTRAL, ResponsesRequest


async def stored(client: httpx.AsyncClient) -> str:
    """The id of a stored response."""
    answer = await client.post(ROUTE, json=asking("Before"))
    return str(answer.json()["id"])


TEXT: dict[str, Any] = {"type": "input_text", "text": "What?"}
ANSWER = {"type": "output_text", "text": "That.", "annotations": []}
REFUSAL = {"type": "refusal", "refusal": "No."}
IMAGE = {"type": "input_image", "image_url": PNG_URL}
VIDEO = {"type": "input_video", "video_url": VIDEO_URL}
PAPER = {"type": "input_file", "file_data": PDF_URL}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "H"}]}


def message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": list(parts)}


def output(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "1", "output": list(parts)}


SAID = asking([message("user", TEXT)])
CUT_OFF = asking([user("hi"), {**message("assistant", ANSWER), "status": "incomplete"}])
CALLED = asking([user("hi"), THOUGHT, CALL, output(TEXT)])
SHOT = asking([user("hi"), CALL, output(IMAGE)])
SEEN = asking([message("user", IMAGE)])
IMAGE_BY_ID = {"type": "input_image", "file_id": STORED_NAME}
FILE = {"type": "input_file", "file_id": STORED_NAME}
SEEN_BY_ID = asking([message("user", IMAGE_BY_ID)])
FILED = asking([message("user", FILE)])
SHOT_BY_ID = asking([user("hi"), CALL, output(IMAGE_BY_ID)])
SHOT_FILE = asking([user("hi"), CALL, output(FILE)])
FILMED = asking([message("user", VIDEO)])
READ = asking([message("user", PAPER)])
READ_AT_URL = asking([message("user", {"type": "input_file", "file_url": PDF_URL})])
READ_IN_RESULT = asking([user("hi"), CALL, output(PAPER)])
WITH_TOOLS = asking(tools=[tool("f", description="F."), tool("g")])
LAST_TOOL = "tools[]{function}"
PART = "input[]{message}.content[]"
RESULT = "input[]{function_call_output}"


def allowing(mode: str, name: str) -> dict[str, Any]:
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name}]}
    return {**WITH_TOOLS, "tool_choice": choice}


MATCHING = asking(text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}})
SCORED = asking(include=[LOGPROBS])
NAMED = {**WITH_TOOLS, "tool_choice": {"type": "function", "name": "f"}}

KINDS = (
    ("input[]{message}", SAID),
    *((f"input[]{{{kind}}}", CALLED) for kind in ("function_call", "function_call_output")),
    ("input[]{reasoning}", CALLED),
)

ITEMS: tuple[Field, ...] = (
    works("role", "input[]{message}.role", "system", on=asking([user("hi"), *SAID["input"]])),
    works("text", "input[]{message}.content", "other", on=SAID),
    works("text", f"{PART}{{input_text}}.text", "other", on=SAID),
    works("text", f"{PART}{{output_text}}.text", "other",
          on=asking([message("user", ANSWER)])),
    works("refusal", f"{PART}{{refusal}}.refusal", "Never.",
          on=asking([message("user", REFUSAL)])),
    ignored("what answers had", f"{PART}{{output_text}}.annotations", [{"type": "x"}],
            on=asking([message("user", ANSWER)])),
    ignored("what answers had", f"{PART}{{output_text}}.logprobs", [{"x": 1}],
            on=asking([message("user", ANSWER)])),
    works("image", f"{PART}{{input_image}}.image_url", OTHER_PNG, on=SEEN),
    works("detail", f"{PART}{{input_image}}.detail", "low", on=SEEN),
    works("image by id", f"{PART}{{input_image}}.file_id", uploaded, on=SEEN_BY_ID),
    works("image by id", f"{PART}{{input_file}}.file_id", uploaded, on=FILED),
    works("video", f"{PART}{{input_video}}.video_url", OTHER_VIDEO_URL, on=FILMED),
    *video_fields.of_part(f"{PART}{{input_video}}", FILMED),
    *video_fields.of_request(FILMED),
    ignored("what answers had", "input[]{message}.phase", "commentary", on=SAID),
    works("continuation", "input[]{message}.status", "completed", on=CUT_OFF, fails=400),
    *(
        works(concept, f"{path}{{input_file}}.{name}", value, on=on)
        for path, on in ((PART, READ), (f"{RESULT}.output[]", READ_IN_RESULT))
        for concept, name, value in (
            ("document", "file_data", OTHER_PDF_URL),
            ("name, title", "filename", "report.pdf"),
            ("pages", "pages", "2"),
            ("size of pages", "dpi", 50),
            ("size of pages", "detail", "low"),
            ("size of pages", "max_pixels", 5000),
            ("text of pages", "include_text", True),
        )
    ),
    works("document", f"{PART}{{input_file}}.file_url", OTHER_PDF_URL, on=READ_AT_URL),
    works("document", f"{RESULT}.output[]{{input_file}}.file_url", OTHER_PDF_URL,
          on=asking([user("hi"), CALL, output({"type": "input_file", "file_url": PDF_URL})])),
    refused("other parts", "input[]{message}.content", [{"type": "input_audio", "data": "f"}],
            on=SAID, named="input[].content[]", title="`input_audio` and others"),
    refused("other parts", "input", [{"type": "mcp_call", "id": "m"}], named="input[]",
            title="items of OpenAI's own tools"),
    works("earlier turns", "input[]{item_reference}.id", "m", fails=404,
          on=asking([{**user("Hi"), "id": "n"}, {"type": "item_reference", "id": "n"}])),
    works("call", "input[]{function_call}.call_id", "2", on=CALLED),
    works("call", "input[]{function_call}.name", "g", on=CALLED),
    works("call", "input[]{function_call}.arguments", "{}", on=CALLED),
    works("result of a call", f"{RESULT}.call_id", "2", on=CALLED),
    works("result of a call", f"{RESULT}.output", "other", on=CALLED),
    works("result of a call", f"{RESULT}.output[]{{input_text}}.text", "other", on=CALLED),
    works("image", f"{RESULT}.output[]{{input_image}}.image_url", OTHER_PNG, on=SHOT),
    works("detail", f"{RESULT}.output[]{{input_image}}.detail", "low", on=SHOT),
    works("image by id", f"{RESULT}.output[]{{input_image}}.file_id", uploaded, on=SHOT_BY_ID),
    works("image by id", f"{RESULT}.output[]{{input_file}}.file_id", uploaded, on=SHOT_FILE),
    works("thought", "input[]{reasoning}.content[]{reasoning_text}.text", "Hm.", on=CALLED),
    ignored("thought", "input[]{reasoning}.summary", [{"type": "summary_text", "text": "H"}],
            on=CALLED),
    ignored("signature, encryption", "input[]{reasoning}.encrypted_content", "x", on=CALLED),
    *(answers("id", f"{path}.id", "item_1", on=on) for path, on in KINDS),
    *(ignored("status", f"{path}.status", "incomplete", on=on, neutral=("completed",),
              where='of other items, unless it is `"completed"`') for path, on in KINDS),
)  # fmt: skip

TOOLS: tuple[Field, ...] = (
    works("tools", "tools", [tool("f")]),
    answers("tools", f"{LAST_TOOL}.namespace", "mcp", on=WITH_TOOLS),
    works("name", f"{LAST_TOOL}.name", "h", on=WITH_TOOLS),
    works("description", f"{LAST_TOOL}.description", "G.", on=WITH_TOOLS),
    works("parameters", f"{LAST_TOOL}.parameters", SCHEMA, on=WITH_TOOLS),
    works("strict arguments", f"{LAST_TOOL}.strict", True, on=WITH_TOOLS),
    works("choice", "tool_choice", "required", on=WITH_TOOLS),
    works("tool that must be called", "tool_choice{function}.name", "g", on=NAMED),
    works("allowed tools", "tool_choice{allowed_tools}.mode", "required", on=allowing("auto", "f")),
    works("allowed tools", "tool_choice{allowed_tools}.tools[]{function}.name", "g",
          on=allowing("auto", "f")),
    works("parallel calls", "parallel_tool_calls", False, on=WITH_TOOLS),
    ignored("number of calls", "max_tool_calls", 3),
)  # fmt: skip

UNKNOWN: tuple[Field, ...] = (
    UNKNOWN_AT_THE_TOP,
    *unknown_in_messages(
        ("input[]{message}", SAID),
        (f"{PART}{{input_text}}", SAID),
        (f"{PART}{{input_image}}", SEEN),
        (f"{PART}{{input_file}}", READ),
        ("input[]{function_call}", CALLED),
        (RESULT, CALLED),
        (f"{RESULT}.output[]{{input_text}}", CALLED),
        ("input[]{reasoning}", CALLED),
        (LAST_TOOL, WITH_TOOLS),
        ("tool_choice{function}", NAMED),
    ),
    *unknown_elsewhere(
        Reading.IGNORED,
        ("text", None),
        ("text.format{json_schema}", MATCHING),
        ("reasoning", None),
        ("thinking", None),
    ),
    *unknown_elsewhere(
        Reading.REFUSED,
        ("stream_options", asking(stream=True)),
        title="those of `stream_options`, `mm_processor_kwargs`, `media_io_kwargs`",
    ),
)

RESPONSES = Dialect(
    title="OpenAI Responses",
    route=ROUTE,
    structs=(ResponsesRequest,),
    usual=asking(),
    fields=(
        works("model", "model", "other", fails=404),
        works("conversation or prompt", "input", [user("other")]),
        works("system prompt", "instructions", "Be brief."),
        works("earlier turns", "previous_response_id", stored),
        works("most tokens", "max_output_tokens", 9),
        works("temperature", "temperature", 0.5),
        works("top p", "top_p", 0.5),
        works("presence penalty", "presence_penalty", 1),
        works("frequency penalty", "frequency_penalty", 1),
        works("past the end", "ignore_eos", True),
        works("log probabilities", "include", [LOGPROBS]),
        ignored("form of the answer", "include", ["reasoning.encrypted_content"],
                named="include.reasoning.encrypted_content"),
        works("likeliest tokens", "top_logprobs", 5, on=SCORED),
        works("format", "text.format", {"type": "json_object"}),
        works("schema", "text.format{json_schema}.schema", {"type": "object"}, on=MATCHING),
        ignored("name, description", "text.format{json_schema}.name", "b", on=MATCHING),
        ignored("name, description", "text.format{json_schema}.description", "B.", on=MATCHING),
        ignored("strictness", "text.format{json_schema}.strict", False, on=MATCHING,
                neutral=(True,)),
        ignored("verbosity", "text.verbosity", "low"),
        *TOOLS,
        works("effort", "reasoning.effort", "low"),
        works("longest thought", "reasoning.max_tokens", 9),
        ignored("what is shown of it", "reasoning.summary", "auto"),
        works("on, off", "thinking.type", "enabled"),
        works("longest thought", "thinking.budget_tokens", 9),
        *ITEMS,
        answers("stream", "stream", True),
        ignored("usage at the end", "stream_options.include_usage", False, on=asking(stream=True),
                neutral=(True,)),
        ignored("padding", "stream_options.include_obfuscation", True, on=asking(stream=True),
                neutral=(False,)),
        answers("storing", "store", False),
        answers("background", "background", True),
        answers("metadata", "metadata", {"a": "b"}),
        ignored("metadata", "client_metadata", {"a": "b"}),
        ignored("user", "user", "me"),
        ignored("user", "safety_identifier", "me"),
        ignored("cache hints", "prompt_cache_key", "k"),
        ignored("cache hints", "prompt_cache_options", {"ttl": "1h"}),
        ignored("cache hints", "prompt_cache_retention", "24h"),
        ignored("moderation", "moderation", {"model": "m"}),
        ignored("priority", "service_tier", "flex"),
        ignored("shortening of the prompt", "truncation", "auto"),
        *UNKNOWN,
        refused("top k", "top_k", 5, neutral=(-1, None)),
        refused("min p", "min_p", 0.1, neutral=(0, None)),
        refused("repetition penalty", "repetition_penalty", 1.1, neutral=(1, None)),
        refused("priority", "priority", 1, neutral=(0, None)),
        refused("context management", "context_management", [{"type": "x"}], neutral=([], None)),
        refused("stored prompt, conversation", "conversation", "conv_1", neutral=(None,)),
        refused("stored prompt, conversation", "prompt", {"id": "p"}, neutral=(None,)),
    ),
    more=HARMLESS | NEUTRAL.keys(),
)  # fmt: skip
