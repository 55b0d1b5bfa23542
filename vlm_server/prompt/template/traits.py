"""The traits of a chat template, probed by rendering short conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_server.prompt.template.tool_turns import MakeId, given_id, numbered_id, short_id
from vlm_server.protocol import ToolCall

Apply = Callable[[Sequence[Mapping[str, Any]], bool, Mapping[str, Any]], str]
"""Renders a prompt from (messages, add_generation_prompt, template variables with `tools`)."""
PROBE = "probe of the template"
PROBE_PARTS = [{"type": "text", "text": PROBE}]
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The fields of a message in which templates look for its reasoning."""
_VALUE, _RESULT, _TOOL = "probed_value", "probed result", "probed_tool"
_OTHER_VALUE = "other_value"
_KIMI = "<|tool_call_argument_begin|>"
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}}
_FUNCTION = {"name": _TOOL, "description": "does nothing", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_BARE_TOOLS = [{"type": "function", "function": {"name": _TOOL, "parameters": _PARAMETERS}}]
_CALL = ToolCall("call_0123456789abcdef01234567", _TOOL, "{}")
_OTHER_CALL = ToolCall("call_1123456789abcdef01234567", _TOOL, "{}")
_Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallStyle:
    """A template's style of calls: arguments as a JSON text or an object, and ids."""

    as_text: bool
    make_id: MakeId


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The traits of a chat template.

    placeholder, video_placeholder: the text rendered for an image, and for a video, if any.
    roles_with_parts: roles whose messages may be lists of parts, with media. calls: None if calls
    are not rendered. takes_user_after_result: whether a user's turn may follow a tool's result.
    takes_several_calls: whether all calls of a turn are rendered. takes_text_with_reasoning:
    whether a turn with a call may have both. needs_descriptions: whether each tool must have one.
    """

    placeholder: str | None
    video_placeholder: str | None
    roles_with_parts: frozenset[str]
    takes_system: bool
    takes_late_system: bool
    """Whether a system message may stand between any two turns."""
    takes_tools: bool
    calls: CallStyle | None
    takes_user_after_result: bool
    takes_several_calls: bool
    takes_text_with_reasoning: bool
    needs_descriptions: bool


class TemplateProbe:
    """Finds the traits of the template that `apply` renders."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._user: Mapping[str, Any] = {"role": "user", "content": PROBE}

    def run(self, image_placeholders: Sequence[str], video_token: str | None) -> TemplateTraits:
        """`image_placeholders` are as in `ModelSpec`; a video's tokens replace `video_token`."""
        prompt = self._render_parts({"role": "user", "content": [{"type": "image"}, *PROBE_PARTS]})
        image_placeholder = next((name for name in image_placeholders if name in prompt), None)
        placeholder = image_placeholder or next(iter(image_placeholders), None)
        roles = {"user"} if image_placeholder else set[str]()
        if image_placeholder:
            self._user = {"role": "user", "content": PROBE_PARTS}
        if self._render_parts({"role": "system", "content": PROBE_PARTS}, self._user):
            roles.add("system")
        if self._render_parts(
            self._user, {"role": "assistant", "content": PROBE_PARTS}, self._user
        ):
            roles.add("assistant")
        calls = self._find_calls()
        if calls and placeholder and self._shows_image_in_result(calls, placeholder):
            roles.add("tool")
        takes_tools = self._takes_tools(_TOOLS)
        return TemplateTraits(
            placeholder=placeholder,
            video_placeholder=self._find_video_placeholder(video_token),
            roles_with_parts=frozenset(roles),
            takes_system=_RESULT
            in self._render([self._message("system", roles, _RESULT), self._user]),
            takes_late_system=self._render(self._with_late_system(roles)).count(_RESULT) > 1,
            takes_tools=takes_tools,
            calls=calls,
            takes_user_after_result=calls is not None
            and self._render([*self._loop(calls, _RESULT), self._user]).count(PROBE) > 1,
            takes_several_calls=calls is None or self._takes_several_calls(calls),
            takes_text_with_reasoning=calls is None or self._takes_text_with_reasoning(calls),
            needs_descriptions=takes_tools and not self._takes_tools(_BARE_TOOLS),
        )

    def _takes_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        return _TOOL in self._render([self._user], {"tools": tools})

    def _takes_several_calls(self, style: CallStyle) -> bool:
        user, turn, result = self._loop(style, _RESULT)
        [call] = turn["tool_calls"]
        arguments = call["function"]["arguments"]
        value: Any = {"key": _OTHER_VALUE}
        if style.as_text:
            value = arguments.replace(_VALUE, _OTHER_VALUE)
        function, other_id = {"name": _TOOL, "arguments": value}, style.make_id(_OTHER_CALL, 1)
        other_call = {**call, "id": other_id, "function": function}
        both = {**turn, "tool_calls": [call, other_call]}
        other_result = {**result, "tool_call_id": other_id}
        text = self._render([user, both, result, other_result], {"tools": _TOOLS})
        return _OTHER_VALUE in text

    def _takes_text_with_reasoning(self, style: CallStyle) -> bool:
        user, turn, result = self._loop(style, _RESULT)
        reasoning = {**turn, **dict.fromkeys(REASONING_FIELDS, PROBE)}
        texts = [
            self._render([user, {**reasoning, "content": content}, result], {"tools": _TOOLS})
            for content in (PROBE, "")
        ]
        return bool(texts[0]) or not texts[1]

    def _find_video_placeholder(self, video_token: str | None) -> str | None:
        """`video_token` with the marks that templates of Qwen's families write around it."""
        if video_token is None:
            return None
        marked_token = f"<|vision_start|>{video_token}<|vision_end|>"
        prompt = self._render_parts({"role": "user", "content": [{"type": "video"}, *PROBE_PARTS]})
        return marked_token if marked_token in prompt else None

    def _with_late_system(self, roles: set[str]) -> list[Mapping[str, Any]]:
        answer = self._message("assistant", roles, "answer")
        system = self._message("system", roles, _RESULT)
        return [self._user, system, self._user, answer, system, self._user]

    def _find_calls(self) -> CallStyle | None:
        for as_text in (False, True):
            for make_id in (given_id, short_id):
                style = CallStyle(as_text, make_id)
                text = self._render(self._loop(style, _RESULT), {"tools": _TOOLS})
                is_repr = "{'key'" in text or '\\"key' in text
                if _VALUE in text and _RESULT in text and not is_repr:
                    return CallStyle(as_text, numbered_id) if _KIMI in text else style
        return None

    def _shows_image_in_result(self, style: CallStyle, placeholder: str) -> bool:
        parts = [{"type": "text", "text": _RESULT}, {"type": "image"}]
        text = self._render(self._loop(style, parts), {"tools": _TOOLS})
        is_repr = "'image'" in text or '"image"' in text
        return _RESULT in text and text.count(placeholder) == 1 and not is_repr

    def _loop(
        self, style: CallStyle, result: str | list[dict[str, str]]
    ) -> list[Mapping[str, Any]]:
        """A user's turn, a call, and its result."""
        arguments: Any = f'{{"key": "{_VALUE}"}}' if style.as_text else {"key": _VALUE}
        made_id = style.make_id(_CALL, 0)
        function = {"name": _TOOL, "arguments": arguments}
        call = {"type": "function", "id": made_id, "function": function}
        return [
            self._user,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": made_id, "name": _TOOL},
        ]

    def _message(self, role: str, roles: set[str], text: str) -> Mapping[str, Any]:
        return {
            "role": role,
            "content": [{"type": "text", "text": text}] if role in roles else text,
        }

    def _render_parts(self, *messages: Mapping[str, Any]) -> str:
        """The rendered `messages`; empty if the template can't take parts as they are."""
        prompt = self._render(messages)
        min_count = sum(message["content"] in (PROBE, PROBE_PARTS) for message in messages) or 1
        return "" if _is_repr(prompt) or prompt.count(PROBE) < min_count else prompt

    def _render(self, messages: _Messages, variables: Mapping[str, Any] | None = None) -> str:
        """The rendered `messages`; empty if the template refuses them."""
        try:
            return self._apply(list(messages), True, variables or {})
        except Exception:  # noqa: BLE001 - any failure means that it does not take them
            return ""


def _is_repr(prompt: str) -> bool:
    """Whether a list of parts was rendered as Python prints it."""
    return "'type'" in prompt or '"type"' in prompt
