"""The JSON of a chat's messages and their parts.

What else clients put into them, such as what they got in an answer, is ignored: see
`http.intake.leniency`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """What an assistant said in place of an answer."""

    refusal: str


class ImageUrl(Struct):
    """With `detail` low the image is scaled down; with `high` and `original`, a small one up."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImageUrlPart(Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str


class VideoUrl(Struct):
    url: str


class VideoUrlPart(Struct, tag_field="type", tag="video_url"):
    video_url: VideoUrl | str


ContentPart = TextPart | RefusalPart | ImageUrlPart | VideoUrlPart


class CalledFunction(Struct):
    """`arguments` is the JSON of an object, or the object, as some clients send it."""

    name: str
    arguments: str | dict[str, Any] | None = None


class FunctionCall(Struct, tag_field="type", tag="function"):
    id: Annotated[str, Meta(min_length=1)]
    function: CalledFunction


class ChatMessage(Struct):
    """One message. `reasoning` is another name of `reasoning_content`.

    `audio` and `function_call` would be the message's contents in forms that are not supported.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    audio: None = None
    function_call: None = None
