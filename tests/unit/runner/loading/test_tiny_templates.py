"""Templates of the tiny models render calls, results and images; none declares a tool format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import FAMILIES
from tests.tiny_models.fixtures import TinyModel, tiny_model
from vlm_server.prompt.template.chat import Chat
from vlm_server.prompt.template.templates import ChatTemplate, load_sandboxed
from vlm_server.protocol import ImagePart, Message, TextPart, ToolCall
from vlm_server.runner.families.table import FAMILIES as ROWS
from vlm_server.runner.loading.chat_templates import reasoning_format, tool_parser

__all__ = ["tiny_model"]

PLACEHOLDERS = (
    "<start_of_image>",
    "<|image|>",
    "[IMG]",
    "<|image_pad|>",
    "<IMG_CONTEXT>",
    "<image>",
)
ASK = Message("user", (TextPart("press it"),))
CALL = Message("assistant", (), tool_calls=(ToolCall("call_a", "click", '{"at": "top"}'),))
RESULT = Message("tool", (TextPart("clicked"), ImagePart(0)), tool_call_id="call_a")


@pytest.fixture(params=[name for name in FAMILIES if not ROWS[name].chat_template])
def source(request: pytest.FixtureRequest, tiny_model: TinyModel) -> str:
    folder: Path = tiny_model(request.param)
    return (folder / "chat_template.jinja").read_text()


def made(source: str) -> ChatTemplate:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(load_sandboxed(source, tokens), PLACEHOLDERS, None, tuple(tokens))


def test_tiny_templates_render_calls_results_and_images(source: str):
    template = made(source)
    text = template.render(template.arrange(Chat((ASK, CALL, RESULT))), str)
    places = [text.index(each) for each in ("press it", "click", "top", "clicked")]
    assert places == sorted(places)
    assert text.count(template.placeholder) == 1
    assert text.index(template.placeholder) > text.index("top"), "LLaVA's come first in a turn"


def test_tiny_templates_continue_last_message(source: str):
    begun = Message("assistant", (TextPart("It is"),))
    assert made(source).render(Chat((ASK, begun), continue_final=True), str).endswith("It is")


def test_tiny_templates_have_no_tools_and_declare_reasoning(source: str):
    parser = tool_parser(source, "auto")
    assert parser is not None
    assert parser.needs_instruction
    assert (reasoning_format(source) is not None) == ("<think>" in source)
