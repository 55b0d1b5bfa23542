"""A conversation rendered to one prompt string with the checkpoint's chat template.

Conversations are arranged (`tool_turns.py`) by the traits of the template (`traits.py`).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from vlm_server.errors import InvalidRequest, ModelLoadError
from vlm_server.interfaces.model_spec import ModelSpec
from vlm_server.prompt.template.chat import (
    Chat,
    arguments_of,
    clean_values,
    field_of,
    fold_system,
    join_texts,
    join_turns,
)
from vlm_server.prompt.template.sandbox import SandboxedTemplate, TemplateError, TemplateRefusal
from vlm_server.prompt.template.tool_turns import (
    Marks,
    add_to_results,
    given_id,
    instruction,
    join_text_to_reasoning,
    move_media_to_user,
    name_results,
    split_calls,
    with_instruction,
    write_as_text,
)
from vlm_server.prompt.template.traits import (
    PROBE,
    PROBE_PARTS,
    REASONING_FIELDS,
    Apply,
    CallStyle,
    TemplateProbe,
)
from vlm_server.protocol import Message, TextPart, ToolCall, VideoPart

_DEFAULTS = {"tools": None, "documents": None, "enable_thinking": False, "thinking": False}
"""Variables that templates read. Reasoning is off unless a request asks for it: many clients never
show its text, and would wait for it."""
_END = "\ue0fc"
"""Marks the place where the answer continues, repeated until the text does not contain it."""
_ENDS = re.compile(f"{_END}+")
_TAIL_CHARACTERS = 20
"""The length of a continued message's end that must precede the cut in the prompt."""
Clean = Callable[[str], str]


def template_of(spec: ModelSpec) -> Apply:
    """The renderer of a model's prompts. Raises ModelLoadError for an unreadable template."""
    if spec.chat_template is not None:
        return load_sandboxed(spec.chat_template, spec.template_variables)

    def write(
        messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, _: Mapping[str, Any]
    ) -> str:
        prompt = spec.write_prompt(messages, add_generation_prompt)
        if not isinstance(prompt, str):
            raise TemplateError("it does not render text")
        return prompt

    return write


def load_sandboxed(source: str, variables: Mapping[str, Any]) -> Apply:
    """The renderer of a template, as in transformers. Raises ModelLoadError if it can't be read."""
    try:
        template = SandboxedTemplate(source)
    except TemplateError as error:
        raise ModelLoadError(str(error)) from None

    def apply(
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        own_variables: Mapping[str, Any],
    ) -> str:
        return template.render(
            **_DEFAULTS
            | dict(variables)
            | dict(own_variables)
            | {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        )

    return apply


class ChatTemplate:
    """Renders chats with a checkpoint's chat template."""

    def __init__(
        self,
        apply: Apply,
        image_placeholders: Sequence[str],
        video_token: str | None,
        names: Sequence[str] = (),
    ) -> None:
        """apply: see `template_of`. image_placeholders: as in `ModelSpec`. video_token: the token
        whose embeddings a video replaces, if the family takes videos. names: variables that no
        request may set."""
        self._apply = apply
        self._names = frozenset(names)
        self._traits = TemplateProbe(apply).run(image_placeholders, video_token)
        self.placeholder = self._traits.placeholder
        """The text of one image in a rendered prompt; None if the model reads text alone."""
        self.video_placeholder = self._traits.video_placeholder
        """The text of one video in a rendered prompt; None if the template takes no videos."""

    def arrange(self, chat: Chat, *, must_call: bool = False, marks: Marks | None = None) -> Chat:
        """`chat` as the template takes it, with its media in the order in which they are rendered.

        Tools that the template can't render are described in the system message if one of them
        `must_call`, or if calls are to stand between `marks`; otherwise, raises InvalidRequest.
        """
        traits = self._traits
        messages = fold_system(
            chat.messages, takes_first=traits.takes_system, takes_later=traits.takes_late_system
        )
        if any(message.role == "tool" or message.tool_calls for message in messages):
            messages = name_results(messages, traits.calls.make_id if traits.calls else given_id)
            if not traits.takes_text_with_reasoning:
                messages = tuple(join_text_to_reasoning(messages))
            if not traits.takes_several_calls:
                messages = tuple(split_calls(messages))
            if traits.calls is None:
                messages = join_turns(write_as_text(messages, marks))
            elif not traits.takes_user_after_result:
                messages = tuple(add_to_results(messages))
            elif "tool" not in traits.roles_with_parts:
                messages = tuple(move_media_to_user(messages))
        takes_tools = traits.takes_tools and (must_call or marks is None)
        if not chat.tools or takes_tools:
            return replace(chat, messages=messages)
        if not must_call and marks is None:
            raise InvalidRequest("this model's chat template has no place for tools", "tools")
        text = instruction(chat.tools, None if must_call else marks)
        instructed = with_instruction(messages, text, takes_system=traits.takes_system)
        return replace(chat, messages=tuple(instructed), tools=())

    def render(self, chat: Chat, clean: Clean) -> str:
        """The prompt up to the beginning of the answer; users' text is cleaned by `clean` first.

        Raises InvalidRequest if the template refuses the messages, or can't leave the last one
        open.
        """
        if reserved := sorted(self._names & chat.variables.keys()):
            param = "chat_template_kwargs"
            raise InvalidRequest(f"`{param}` can't set `{reserved[0]}`.", param)
        variables = clean_values(chat.variables, clean)
        if chat.tools:
            variables["tools"] = clean_values(chat.tools, clean)
            if self._traits.needs_descriptions:
                variables["tools"] = [_described(tool) for tool in variables["tools"]]
        if chat.continue_final:
            return self._render_open(chat, clean, variables)
        return self._render(chat.messages, clean, variables)

    def check(self) -> None:
        """Raises ModelLoadError for a template that can't render one message."""
        try:
            self._apply([self._question()], True, {})
        except TemplateError as error:
            raise ModelLoadError(f"the chat template can't render a message: {error}") from None

    def generation_suffix(self, variables: Mapping[str, Any]) -> str:
        """The generation prompt, which the template writes after the last message; may be empty."""
        messages = [self._question()]
        try:
            with_suffix = self._apply(messages, True, variables)
            without = self._apply(messages, False, variables)
        except TemplateError:
            return ""
        return with_suffix.removeprefix(without) if with_suffix.startswith(without) else ""

    def _question(self) -> dict[str, Any]:
        takes_parts = "user" in self._traits.roles_with_parts
        return {"role": "user", "content": PROBE_PARTS if takes_parts else PROBE}

    # ---- messages --------------------------------------------------------------------------

    def _message(self, message: Message, clean: Clean) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": message.role, "content": self._content(message, clean)}
        if message.reasoning:
            fields |= dict.fromkeys(REASONING_FIELDS, clean(message.reasoning))
        if message.tool_calls and self._traits.calls is not None:
            style = self._traits.calls
            fields["tool_calls"] = [_call(call, style, clean) for call in message.tool_calls]
        if message.role == "tool":
            names_of_call = {"tool_call_id": message.tool_call_id, "name": message.name}
            fields |= {key: clean(value) for key, value in names_of_call.items() if value}
        return fields

    def _content(self, message: Message, clean: Clean) -> str | list[Any]:
        if message.role not in self._traits.roles_with_parts or not message.content:
            placeholder, parts = self.placeholder or "", message.content
            return "".join(clean(p.text) if isinstance(p, TextPart) else placeholder for p in parts)
        return [
            {"type": "text", "text": clean(part.text)}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
            for part in message.content
        ]

    # ---- rendering -------------------------------------------------------------------------

    def _render_open(self, chat: Chat, clean: Clean, variables: Mapping[str, Any]) -> str:
        """The prompt, cut off after the last message's text."""
        last_message = chat.messages[-1]
        if last_message.role != "assistant" or last_message.tool_calls:
            raise InvalidRequest("only an assistant's text can be continued", last_message.param)
        longest = max((len(run) for text in chat.texts() for run in _ENDS.findall(text)), default=0)
        end = _END * (longest + 1)
        open_message = msgspec.structs.replace(
            last_message, content=(*last_message.content, TextPart(end))
        )
        messages = join_texts([*chat.messages[:-1], open_message])
        prompt, mark, _ = self._render(messages, clean, variables, False).rpartition(end)
        text = clean(
            "".join(part.text for part in last_message.content if isinstance(part, TextPart))
        )
        if not mark or not prompt.endswith(text[-_TAIL_CHARACTERS:].lstrip()):
            raise InvalidRequest(
                "this model's chat template can't continue the last message", last_message.param
            )
        return prompt

    def _render(
        self,
        messages: Sequence[Message],
        clean: Clean,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        rendered_messages = [self._message(message, clean) for message in messages]
        try:
            return self._apply(rendered_messages, add_generation_prompt, variables)
        except TemplateRefusal as error:
            refused_param = messages[
                self._num_taken(rendered_messages, variables, str(error))
            ].param
            raise _refusal(f"`{refused_param}`", error, refused_param) from None
        except Exception as error:  # noqa: BLE001 - templates are programs of their own
            raise _refusal("the conversation", error, field_of(messages)) from None

    def _num_taken(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], reason: str
    ) -> int:
        """The number of messages that the template takes before it refuses one for `reason`."""

        def is_refused(num_messages: int) -> bool:
            try:
                self._apply(messages[:num_messages], True, variables)
            except TemplateError as error:
                return str(error) == reason
            return False

        return bisect_left(range(1, len(messages)), True, key=is_refused)


def _refusal(subject: str, error: Exception, param: str) -> InvalidRequest:
    reason = re.sub(r"\s+", " ", str(error))[:200]
    return InvalidRequest(f"this model's chat template refuses {subject}: {reason}", param)


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with a description, which may be empty."""
    return {**tool, "function": {"description": "", **tool["function"]}}


def _call(call: ToolCall, style: CallStyle, clean: Clean) -> dict[str, Any]:
    arguments = clean_values(arguments_of(call.arguments), clean)
    function = {"name": clean(call.name), "arguments": arguments}
    if style.as_text:
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "id": clean(call.id), "function": function}
