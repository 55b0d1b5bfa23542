"""Fields of Anthropic's messages, and of counting their tokens."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from tests.support import pdf
from tests.support.image_files import image_file
from tests.unit.api.dialects.anthropic.steps import (
    COUNT_ROUTE,
    IMAGE_BLOCK,
    LOOK,
    ROUTE,
    assistant,
    call,
    request,
    result,
    text,
)
from tests.unit.api.fields.count_fields import COUNTED, counting
from tests.unit.api.fields.field import (
    STORED_NAME,
    STORED_PDF_NAME,
    Dialect,
    Field,
    Reading,
    answers,
    ignored,
    refused,
    unknown_elsewhere,
    unknown_in_messages,
    uploaded,
    uploaded_pdf,
    works,
)
from tests.unit.api.fields.openai_fields import SCHEMA
from tests.unit.api.requests import user
from tests.unit.api.scripted_engine import ended, finished, thinks
from tests.unit.api.scripted_engine import text as says
from vlm_server.api.dialects.anthropic.schema import SIGNATURE, MessagesRequest

OTHER = base64.b64encode(image_file("PNG", (9, 7))).decode()
URL_IMAGE = {"type": "image", "source": {"type": "url", "url": "data:image/png;base64," + OTHER}}
OTHER_URL = "data:image/png;base64," + IMAGE_BLOCK["source"]["data"]
THOUGHT = {"type": "thinking", "thinking": "Hm."}
HIDDEN = {"type": "redacted_thinking", "data": "x"}
MARK = {"type": "ephemeral"}

PDF, OTHER_PDF = (base64.b64encode(pdf.numbered(num)).decode() for num in (2, 3))


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


IN_BASE64 = document(type="base64", media_type="application/pdf", data=PDF)
AT_URL = document(type="url", url=pdf.data_url(pdf.numbered(2)))
PLAIN = document(type="text", media_type="text/plain", data="It is late.")
OF_BLOCKS = document(type="content", content=[text(), IMAGE_BLOCK])
SAID = request(user(text()))
SEEN = request(user(IMAGE_BLOCK))
LINKED = request(user(URL_IMAGE))
CALLED = request(user("hi"), assistant(THOUGHT, call(screen=1)), user(result(text())))
NAMED_IMAGE = {"type": "image", "source": {"type": "file", "file_id": STORED_NAME}}
NAMED = request(user(NAMED_IMAGE))
SHOT_NAMED = request(user("hi"), assistant(call()), user(result(NAMED_IMAGE)))
SHOT = request(user("hi"), assistant(call()), user(result(IMAGE_BLOCK)))
SHOT_LINKED = request(user("hi"), assistant(call()), user(result(URL_IMAGE)))
WITH_TOOLS = request(tools=[{**LOOK, "name": "other"}, LOOK])
COMPUTER = request(
    tools=[{"type": "computer_20251124", "name": "computer", "display_width_px": 800,
            "display_height_px": 600}]
)  # fmt: skip
EDITOR = request(tools=[{"type": "text_editor_20250728", "name": "editor"}])
MATCHING = request(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
BLOCK = "messages[].content[]"
CALL = "messages[assistant].content[]{tool_use}"
RESULT = f"{BLOCK}{{tool_result}}"
DOCUMENT = f"{BLOCK}{{document}}"


def choosing(kind: str, **fields: Any) -> dict[str, Any]:
    return {**WITH_TOOLS, "tool_choice": {"type": kind, **fields}}


def documents(path: str, holding: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Field]:
    """The fields of a document at `path`; `holding` makes a request that has it there."""
    read, at_url, plain, of_blocks = map(holding, (IN_BASE64, AT_URL, PLAIN, OF_BLOCKS))
    source, image = f"{path}.source", f"{path}.source{{content}}.content[]{{image}}.source"
    for concept, name, value in (
        ("document", "source{base64}.data", OTHER_PDF),
        ("name, title", "title", "Report"),
        ("context", "context", "Of this year."),
        ("pages", "pages", "2"),
        ("size of pages", "dpi", 50),
        ("size of pages", "max_pixels", 5000),
        ("text of pages", "include_text", True),
        ("citations", "citations.enabled", True),
    ):
        yield works(concept, f"{path}.{name}", value, on=read)
    yield works("document", f"{source}{{url}}.url", pdf.data_url(pdf.numbered(3)), on=at_url)
    named = holding(document(type="file", file_id=STORED_PDF_NAME))
    yield works("document by id", f"{source}{{file}}.file_id", uploaded_pdf, on=named)
    yield works("document", f"{source}{{text}}.data", "other", on=plain)
    yield works("document", f"{source}{{content}}.content", "other", on=of_blocks)
    yield works("document", f"{source}{{content}}.content[]{{text}}.text", "other", on=of_blocks)
    yield works("image", f"{image}{{base64}}.data", OTHER, on=of_blocks)
    by_id = holding(document(type="content", content=[NAMED_IMAGE]))
    yield works("image by id", f"{image}{{file}}.file_id", uploaded, on=by_id)
    linked = holding(document(type="content", content=[URL_IMAGE]))
    yield works("image", f"{image}{{url}}.url", OTHER_URL, on=linked)
    yield ignored(
        "media type",
        f"{image}{{base64}}.media_type",
        "image/webp",
        on=of_blocks,
        neutral=("image/png",),
        where="unless it is that of the bytes",
    )
    yield ignored(
        "type of a document",
        f"{source}{{base64}}.media_type",
        "text/plain",
        on=read,
        neutral=("application/pdf",),
        where="unless it is that of the bytes",
    )
    yield refused(
        "type of a document",
        f"{source}{{text}}.media_type",
        "text/html",
        on=plain,
        neutral=("text/plain", None),
    )
    yield ignored("citations", f"{path}.citations.enabled", True, on=plain, neutral=(False,),
                  where="of documents without pages")  # fmt: skip


MESSAGES: tuple[Field, ...] = (
    works("conversation or prompt", "messages", [user("other")]),
    works("system prompt", "system", "Be brief."),
    works("system prompt", "system[]{text}.text", "Be loud.", on=request(system=[text()])),
    works("role", "messages[].role", "system", on=request(user("hi"), user("ho"))),
    works("continuation", "messages[].role", "assistant", on=request(user("hi"), user("ho")),
          title="a last message of the assistant"),
    works("text", "messages[].content", "other"),
    works("text", f"{BLOCK}{{text}}.text", "other", on=SAID),
    ignored("cache marks", f"{BLOCK}{{text}}.cache_control", MARK, on=SAID),
    ignored("cache marks", "system[].cache_control", MARK, on=request(system=[text()])),
    ignored("what answers had", f"{BLOCK}{{text}}.citations", [{"type": "x"}], on=SAID),
    works("image", f"{BLOCK}{{image}}.source{{base64}}.data", OTHER, on=SEEN),
    works("image", f"{BLOCK}{{image}}.source{{url}}.url", OTHER_URL, on=LINKED),
    works("image by id", f"{BLOCK}{{image}}.source{{file}}.file_id", uploaded, on=NAMED),
    ignored("media type", f"{BLOCK}{{image}}.source{{base64}}.media_type", "image/webp", on=SEEN,
            neutral=("image/png",), where="unless it is that of the bytes"),
    works("call", f"{CALL}.id", "2", on=CALLED),
    works("call", f"{CALL}.name", "other", on=CALLED),
    works("call", f"{CALL}.input", {"screen": 2}, on=CALLED),
    works("result of a call", f"{RESULT}.tool_use_id", "2", on=CALLED),
    works("result of a call", f"{RESULT}.content", "other", on=CALLED),
    works("result of a call", f"{RESULT}.content[]{{text}}.text", "other", on=CALLED),
    ignored("cache marks", f"{RESULT}.cache_control", MARK, on=CALLED),
    works("image", f"{RESULT}.content[]{{image}}.source{{base64}}.data", OTHER, on=SHOT),
    works("image", f"{RESULT}.content[]{{image}}.source{{url}}.url", OTHER_URL, on=SHOT_LINKED),
    works("image by id", f"{RESULT}.content[]{{image}}.source{{file}}.file_id", uploaded,
          on=SHOT_NAMED),
    *documents(DOCUMENT, lambda block: request(user(block))),
    *documents(
        f"{RESULT}.content[]{{document}}",
        lambda block: request(user("hi"), assistant(call()), user(result(block))),
    ),
    refused("other parts", "messages[].content", [{"type": "search_result", "source": "x"}],
            named="messages[].content[].type", title="`search_result` and others"),
    ignored("media type", f"{RESULT}.content[]{{image}}.source{{base64}}.media_type", "image/webp",
            on=SHOT, neutral=("image/png",), where="unless it is that of the bytes"),
    works("failure", f"{RESULT}.is_error", True, on=CALLED),
    works("thought", "messages[assistant].content[]{thinking}.thinking", "Oh.", on=CALLED),
    ignored("signature, encryption", "messages[assistant].content[]{thinking}.signature", "abc",
            on=CALLED, neutral=(SIGNATURE,), where="unless it is this server's"),
    ignored("signature, encryption", "messages[assistant].content[]{redacted_thinking}.data", "y",
            on=request(user("hi"), assistant(HIDDEN, text()), user("so?")),
            named="messages[].content[].redacted_thinking"),
)  # fmt: skip

TOOLS: tuple[Field, ...] = (
    works("tools", "tools", [LOOK]),
    works("name", "tools[].name", "watch", on=WITH_TOOLS),
    works("description", "tools[].description", "Watches.", on=WITH_TOOLS),
    works("parameters", "tools[].input_schema", SCHEMA, on=WITH_TOOLS),
    works("strict arguments", "tools[].strict", True, on=WITH_TOOLS),
    ignored("cache marks", "tools[].cache_control", MARK, on=WITH_TOOLS),
    works("type", "tools[].type", "bash_20250124", on=EDITOR),
    works("settings of Anthropic's tools", "tools[].display_width_px", 900, on=COMPUTER),
    works("settings of Anthropic's tools", "tools[].display_height_px", 900, on=COMPUTER),
    works("settings of Anthropic's tools", "tools[].enable_zoom", True, on=COMPUTER),
    works("settings of Anthropic's tools", "tools[].max_characters", 900, on=EDITOR),
    ignored("settings of Anthropic's tools", "tools[].display_number", 1, on=COMPUTER),
    ignored("settings of Anthropic's tools", "tools[].max_characters", 900, on=COMPUTER,
            where="of other types"),
    ignored("settings of Anthropic's tools", "tools[].display_width_px", 900, on=WITH_TOOLS,
            where="of other types"),
    ignored("description", "tools[].description", "D.", on=COMPUTER,
            where="of Anthropic's types"),
    ignored("parameters", "tools[].input_schema", SCHEMA, on=COMPUTER,
            where="of Anthropic's types"),
    works("choice", "tool_choice", {"type": "any"}, on=WITH_TOOLS),
    works("tool that must be called", "tool_choice{tool}.name", "other",
          on=choosing("tool", name="look")),
    works("parallel calls", "tool_choice{auto}.disable_parallel_tool_use", True,
          on=choosing("auto")),
    works("parallel calls", "tool_choice{any}.disable_parallel_tool_use", True,
          on=choosing("any")),
    ignored("parallel calls", "tool_choice{tool}.disable_parallel_tool_use", False,
            on=choosing("tool", name="look"), neutral=(True,),
            where="if it is `false` with `tool`"),
    ignored("tools that servers run", "mcp_servers", [{"name": "x"}]),
)  # fmt: skip

ANSWERS: tuple[Field, ...] = (
    works("most tokens", "max_tokens", 99),
    works("stop strings", "stop_sequences", ["x"]),
    works("temperature", "temperature", 0.5),
    works("top p", "top_p", 0.5),
    works("top k", "top_k", 5),
    answers("stream", "stream", True),
    works("format", "output_config.format", {"type": "json_schema", "schema": SCHEMA}),
    works("schema", "output_config.format.schema", {"type": "object"}, on=MATCHING),
    works("on, off", "thinking", {"type": "enabled"}),
    works("effort", "output_config.effort", "low"),
    works("longest thought", "thinking{enabled}.budget_tokens", 9),
    works("longest thought", "thinking{adaptive}.budget_tokens", 9),
    answers("what is shown of it", "thinking{enabled}.display", "omitted"),
    answers("what is shown of it", "thinking{adaptive}.display", "omitted"),
    ignored("metadata", "metadata", {"user_id": "me"}),
    ignored("priority", "service_tier", "auto"),
    ignored("cache marks", "cache_control", MARK),
    ignored("context management", "context_management", {"edits": [{"type": "x"}]}),
    ignored("earlier turns", "container", "c_1"),
    refused("earlier turns", "thread", {"type": "create"}, neutral=(None,)),
)

UNKNOWN: tuple[Field, ...] = (
    ignored("at the top", "colour", "red", title="any"),
    *unknown_in_messages(
        ("messages[]", SAID),
        (f"{BLOCK}{{text}}", SAID),
        (f"{BLOCK}{{image}}", SEEN),
        (DOCUMENT, request(user(IN_BASE64))),
        (f"{BLOCK}{{image}}.source{{base64}}", SEEN),
        (CALL, CALLED),
        (RESULT, CALLED),
        (f"{RESULT}.content[]{{text}}", CALLED),
        ("tools[]", WITH_TOOLS),
    ),
    *unknown_elsewhere(
        Reading.IGNORED,
        ("thinking{enabled}", None),
        ("thinking{disabled}", None),
        ("output_config", None),
        ("output_config.format", MATCHING),
        ("tool_choice{auto}", choosing("auto")),
    ),
)

MESSAGE = Dialect(
    title="Anthropic messages",
    route=ROUTE,
    structs=(MessagesRequest,),
    usual=request(),
    fields=(works("model", "model", "other", fails=404), *MESSAGES, *TOOLS, *ANSWERS, *UNKNOWN),
    script=(thinks("Hm."), says("Hello"), ended(), finished()),
)

COUNT_TOKENS = Dialect(
    title="`/v1/messages/count_tokens`",
    route=COUNT_ROUTE,
    structs=(MessagesRequest,),
    usual=request(),
    fields=counting(
        MESSAGE.fields,
        for_answers=(
            *("max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "stream"),
            *("output_config.format", "thinking.budget_tokens", "thinking.display"),
            *("tool_choice.disable_parallel_tool_use", "tool_choice.name", "tools[].strict"),
        ),
    ),
    script=COUNTED,
    counts=True,
)
