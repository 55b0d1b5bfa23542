"""Renders a conversation to one prompt string with the checkpoint's chat template.

Content parts keep the order in which the user gave them. Templates differ in two ways, which
rendering a probe tells: for which roles they take a list of parts, and what they write for an
image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from vlm_server.errors import InvalidRequest, ModelLoadError
from vlm_server.host_model import HostModel
from vlm_server.prompt.sandbox import SandboxedTemplate, TemplateError
from vlm_server.protocol import ContentPart, Message, TextPart, VideoPart

Apply = Callable[[Sequence[Mapping[str, Any]], bool], Any]
"""(messages, add_generation_prompt) to the prompt's text."""
_PROBE = "probe of the template"
_NOTHING_ELSE = {"tools": None, "documents": None, "enable_thinking": False}
"""What else templates ask for."""
_PROBE_PARTS = [{"type": "text", "text": _PROBE}]


def join_texts(messages: Sequence[Message]) -> list[Message]:
    """`messages` with neighbouring text parts as one, as the model reads them.

    Templates trim parts, or take the first one alone. And a control token that is split between
    two parts is whole again once they are rendered.
    """
    return [Message(message.role, tuple(_joined(message.content))) for message in messages]


def _joined(parts: Sequence[ContentPart]) -> Iterator[ContentPart]:
    for is_text, group in groupby(parts, lambda part: isinstance(part, TextPart)):
        if is_text:
            yield TextPart("".join(part.text for part in group if isinstance(part, TextPart)))
        else:
            yield from group


def template_of(host: HostModel) -> Apply:
    """What renders a model's prompts: its template in a sandbox, if it has one.

    Raises ModelLoadError for a template that can't be read.
    """
    if host.chat_template is None:
        return host.write_prompt
    return sandboxed(host.chat_template, host.template_variables)


def sandboxed(source: str, variables: Mapping[str, Any]) -> Apply:
    """Renders a template as transformers does. Raises ModelLoadError if it can't be read."""
    try:
        template = SandboxedTemplate(source)
    except TemplateError as error:
        raise ModelLoadError(str(error)) from None

    def apply(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return template.render(
            **_NOTHING_ELSE
            | dict(variables)
            | {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        )

    return apply


class ChatTemplate:
    """Renders messages the way a checkpoint's chat template wants them."""

    def __init__(
        self,
        apply: Apply,
        image_placeholders: Sequence[str],
        video_token: str | None,
    ) -> None:
        """`apply`: see `template_of`; `image_placeholders` are as in `HostModel`.

        `video_token` is the token whose embeddings a video replaces, for families that take videos.
        """
        self._apply_template = apply
        asked = self._probe({"role": "user", "content": [{"type": "image"}, *_PROBE_PARTS]})
        found = next((name for name in image_placeholders if name in asked), None)
        self.placeholder = found or image_placeholders[0]
        """What stands for one image in a rendered prompt."""
        self._roles_with_parts = {"user"} if found else set[str]()
        self.video_placeholder = self._find_video_placeholder(video_token)
        """What stands for one video in a rendered prompt; None if nothing does."""
        user = {"role": "user", "content": _PROBE_PARTS if found else "text"}
        if self._probe({"role": "system", "content": _PROBE_PARTS}, user):
            self._roles_with_parts.add("system")
        if self._probe(user, {"role": "assistant", "content": _PROBE_PARTS}, user):
            self._roles_with_parts.add("assistant")

    def render(self, messages: Sequence[Message], clean: Callable[[str], str]) -> str:
        """The prompt up to where the answer begins; user text goes through `clean` first.

        Raises InvalidRequest if the template refuses the order of roles.
        """
        rendered = [
            {"role": message.role, "content": self._content(message, clean)} for message in messages
        ]
        try:
            return self._apply(rendered)
        except Exception as error:  # noqa: BLE001 - templates are programs of their own
            reason = re.sub(r"\s+", " ", str(error))[:200]
            raise InvalidRequest(
                f"this model's chat template refuses the conversation: {reason}", "messages"
            ) from None

    @property
    def generation_suffix(self) -> str:
        """What the template writes after the last message to begin the answer; may be empty.

        Raises ModelLoadError if it can't even render one message.
        """
        content = _PROBE_PARTS if "user" in self._roles_with_parts else _PROBE
        messages = [{"role": "user", "content": content}]
        try:
            with_suffix = self._apply(messages)
            without = self._apply(messages, add_generation_prompt=False)
        except TemplateError as error:
            raise ModelLoadError(f"the chat template can't render a message: {error}") from None
        return with_suffix.removeprefix(without) if with_suffix.startswith(without) else ""

    def _content(self, message: Message, clean: Callable[[str], str]) -> str | list[Any]:
        if message.role not in self._roles_with_parts:
            return "".join(
                clean(part.text) if isinstance(part, TextPart) else self.placeholder
                for part in message.content
            )
        return [
            {"type": "text", "text": clean(part.text)}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
            for part in message.content
        ]

    def _find_video_placeholder(self, video_token: str | None) -> str | None:
        """The token with the marks that templates of Qwen's families write around it."""
        if video_token is None:
            return None
        marked = f"<|vision_start|>{video_token}<|vision_end|>"
        asked = self._probe({"role": "user", "content": [{"type": "video"}, *_PROBE_PARTS]})
        return marked if marked in asked else None

    def _apply(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        prompt = self._apply_template(messages, add_generation_prompt)
        if not isinstance(prompt, str):
            raise ModelLoadError("the chat template does not render text")
        return prompt

    def _probe(self, *messages: dict[str, Any]) -> str:
        """What the template makes of `messages`; empty if it can't take parts as they are."""
        try:
            prompt = self._apply(list(messages))
        except Exception:  # noqa: BLE001 - any failure means that it takes no parts
            return ""
        is_repr = "'type'" in prompt or '"type"' in prompt
        wanted = sum(message["content"] is _PROBE_PARTS for message in messages) or 1
        return "" if is_repr or prompt.count(_PROBE) < wanted else prompt
