"""A model's chat template, and the formats of tool calls and reasoning found in it.

The template is that of the settings, the checkpoint's, or one of ours: base models and old
conversions have none. Those are served with the turn tokens that their tokenizer knows, or else
with the names of roles, and with a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_vlm.tools.registry import SPECS, _infer_tool_parser, load_tool_module

from vlm_server.errors import ModelLoadError
from vlm_server.interfaces.model_spec import ReasoningFormat, ToolParser
from vlm_server.settings import AUTO, OFF

_MAX_BYTES = 1 << 20
_JSON_TOOLS = "json_tools"
"""The format of most models: JSON between marks."""
_JSON_CALL = re.compile(r"<tool_call>.*\"name\\?\"", re.DOTALL)
"""A tool call in templates like Qwen's, with any names of variables."""
_REASONING = {
    ("<|channel>", "<channel|>"): ReasoningFormat("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis",): ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        headers=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>commentary<|message|>",
        ),
        end_tokens=("<|return|>", "<|call|>"),
        answer_header="<|channel|>final<|message|>",
        after="<|start|>assistant",
    ),
    ("<|START_THINKING|>",): ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<mm:think>",): ReasoningFormat("<mm:think>", "</mm:think>"),
    ("<seed:think>",): ReasoningFormat("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"): ReasoningFormat("[THINK]", "[/THINK]"),
    ("\u25c1/think\u25b7",): ReasoningFormat("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<think>", "</think>"): ReasoningFormat("<think>", "</think>"),
}
"""Reasoning formats by substrings of chat templates, each of which identifies one."""


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """A template, if any. `end_token`, if any, ends an answer.

    warnings: for the log and clients.
    """

    text: str | None = None
    end_token: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Marks:
    """The text around a turn. `start`: a Jinja expression of `role`; `last`: before an answer."""

    start: str
    end: str
    last: str
    end_token: str | None = None


_KNOWN = {
    "<|im_start|>": _Marks(
        "'<|im_start|>' + role + '\\n'", "<|im_end|>\\n", "<|im_start|>assistant\\n", "<|im_end|>"
    ),
    "<start_of_turn>": _Marks(
        "'<start_of_turn>' + ('model' if role == 'assistant' else 'user') + '\\n'",
        "<end_of_turn>\\n",
        "<start_of_turn>model\\n",
        "<end_of_turn>",
    ),
    "<|start_header_id|>": _Marks(
        "'<|start_header_id|>' + role + '<|end_header_id|>\\n\\n'",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
        "<|eot_id|>",
    ),
}
"""Marks of turns by a token that only tokenizers for such turns have."""
_ROLES = _Marks("role.upper() + ': '", "\\n", "ASSISTANT:")
_TEMPLATE = """\
{%%- if bos_token %%}{{- bos_token }}{%% endif %%}
{%%- for message in messages %%}
{%%- set role = message.role %%}
{{- %(start)s }}
{%%- if message.content is string %%}{{- message.content }}
{%%- else %%}
{%%- for part in message.content %%}
{%%- if part.type == 'image' %%}{{- %(image)s }}
{%%- elif part.type == 'video' %%}{{- %(video)s }}
{%%- else %%}{{- part.text }}
{%%- endif %%}
{%%- endfor %%}
{%%- endif %%}
{{- '%(end)s' }}
{%%- endfor %%}
{%%- if add_generation_prompt %%}{{- '%(last)s' }}{%% endif %%}
"""


def template_in(file: str) -> ChosenTemplate:
    """The template of `ModelSettings.chat_template`. Raises ModelLoadError if it can't be read."""
    path = Path(file)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelLoadError(f"model.chat_template: {path} is too large for a template")
        return ChosenTemplate(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"model.chat_template: can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelLoadError(f"model.chat_template: {path} is no text") from None


def own_template(image: str | None, video: str | None, tokens: Collection[str]) -> ChosenTemplate:
    """A template for a checkpoint without one. `tokens`: its tokenizer's, with the special ones.

    `image` and `video` are the tokens that stand for an image and for a video, if there are any.
    """
    name = next((token for token in _KNOWN if token in tokens), None)
    marks = _ROLES if name is None else _KNOWN[name]
    as_what = f"turns are marked with {name}" if name else 'turns are marked with "USER:"'
    text = _TEMPLATE % {
        "start": marks.start,
        "end": marks.end,
        "last": marks.last,
        "image": json.dumps(_between_marks(image or "", tokens)),
        "video": json.dumps(_between_marks(video or image or "", tokens)),
    }
    warning = (
        f"the checkpoint has no chat template: {as_what}, which may not be how the model was "
        "trained; name a file with its template in model.chat_template (--chat-template)"
    )
    return ChosenTemplate(text, marks.end_token, (warning,))


def _between_marks(token: str, tokens: Collection[str]) -> str:
    """`token` between the tokens that Qwen's families write around an image or video."""
    start, end = "<|vision_start|>", "<|vision_end|>"
    return f"{start}{token}{end}" if start in tokens and end in tokens else token


def template_of_checkpoint(processor: Any) -> str | None:
    """The template that mlx-vlm would render; None without one.

    Raises ModelLoadError for a template that is no text.
    """
    owners: Sequence[Any] = (processor, getattr(processor, "tokenizer", None))
    templates = (getattr(owner, "chat_template", None) for owner in owners)
    template = next((template for template in templates if template is not None), None)
    if isinstance(template, Mapping):
        template = template.get("default", "")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError("the chat template is no text")
    return template


def tool_parser(template: str | None, parser: str) -> ToolParser | None:
    """The parser for a model with this chat template; None if it calls no tools.

    A model whose template has no known format gets that of most models, with an instruction.
    `parser` is `ModelSettings.tool_parser`. Raises ModelLoadError if it is unknown.
    """
    if parser == OFF:
        return None
    names = sorted(spec.name for spec in SPECS)
    if parser != AUTO and parser not in names:
        raise ModelLoadError(
            f"model.tool_parser: there is no {parser!r}, only {', '.join([AUTO, OFF, *names])}"
        )
    name = _infer_tool_parser(template, None if parser == AUTO else parser)
    needs_instruction = name is None and not _JSON_CALL.search(template or "")
    module = load_tool_module(name or _JSON_TOOLS)
    return ToolParser(
        name or _JSON_TOOLS,
        module.tool_call_start,
        module.tool_call_end,
        module.parse_tool_call,
        needs_instruction,
    )


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The marks of reasoning in a chat template; None if it has none."""
    formats = (
        f for marks, f in _REASONING.items() if any(mark in (template or "") for mark in marks)
    )
    return next(formats, None)
