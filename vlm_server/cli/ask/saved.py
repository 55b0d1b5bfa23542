"""Conversations in files: as JSON, from which they go on, or as Markdown for people."""

from __future__ import annotations

import base64
import binascii
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from vlm_server.cli.ask import media
from vlm_server.cli.ask.conversation import ChatSession, Turn
from vlm_server.cli.ask.media import Medium
from vlm_server.cli.ask.parameters import ParameterValue
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.settings import Limits

_MARKDOWN = (".md", ".markdown")
_DATA_URL = re.compile(r"data:([\w/.+-]+);base64,(.*)", re.DOTALL)


class SavedTurn(msgspec.Struct):
    """A question as it was sent, the names of its media, and the answer."""

    content: list[dict[str, Any]]
    answer: str
    names: list[str] = []


class SavedConversation(msgspec.Struct):
    """What a conversation's file holds."""

    model: str
    turns: list[SavedTurn]
    system: str | None = None
    parameters: dict[str, ParameterValue] = {}


def default_name() -> str:
    """A name for a file in the working folder."""
    return time.strftime("conversation-%Y%m%d-%H%M%S.json")


def save(path: Path, conversation: ChatSession) -> None:
    """Write a file that its owner alone can read. Raises CommandFailed, also if it exists."""
    is_markdown = path.suffix.lower() in _MARKDOWN
    data = _markdown(conversation).encode() if is_markdown else _json(conversation)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except FileExistsError:
        raise CommandFailed(f"{path} is already there: choose another name") from None
    except OSError as error:
        raise CommandFailed(f"can't write {path}: {error.strerror}") from None


def load(path: Path, limits: Limits) -> SavedConversation:
    """The conversation in a file. Raises CommandFailed if it is none, or too large to be sent."""
    try:
        if path.stat().st_size > limits.max_body_bytes:
            raise CommandFailed(f"{path} is larger than a request may be (limits.max_body_bytes)")
        return msgspec.json.decode(path.read_bytes(), type=SavedConversation)
    except OSError as error:
        raise CommandFailed(f"can't read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CommandFailed(f"{path} is no conversation: /save NAME.json makes one") from None


def turns(saved: SavedConversation, limits: Limits) -> list[Turn]:
    """The turns of a file. Raises CommandFailed for a picture that the daemon would refuse."""
    return [_turn(turn, limits) for turn in saved.turns]


def _turn(saved: SavedTurn, limits: Limits) -> Turn:
    texts = [str(part.get("text", "")) for part in saved.content if part.get("type") == "text"]
    names = iter(saved.names)
    found = tuple(
        media.checked(Medium(next(names, "picture"), kind, data), limits)
        for kind, data in _contents(saved.content)
    )
    content = [*(medium.part for medium in found), {"type": "text", "text": "\n".join(texts)}]
    return Turn(found, "\n".join(texts), saved.answer, content)


def _contents(content: list[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """The MIME types and bytes of the media in a question."""
    for part in content:
        source = part.get(str(part.get("type")))
        url = (source.get("url") or source.get("file_data")) if isinstance(source, dict) else None
        if match := _DATA_URL.fullmatch(str(url or "")):
            try:
                yield match[1], base64.b64decode(match[2], validate=True)
            except binascii.Error:
                raise CommandFailed("a picture of the conversation is broken") from None


def _json(conversation: ChatSession) -> bytes:
    saved = SavedConversation(
        str(conversation.model["id"]),
        [
            SavedTurn(turn.content, turn.answer, [medium.name for medium in turn.media])
            for turn in conversation.turns
        ],
        conversation.system,
        conversation.values,
    )
    return msgspec.json.format(msgspec.json.encode(saved), indent=1)


def _markdown(conversation: ChatSession) -> str:
    lines = [f"# A conversation with {conversation.model['id']}", ""]
    if conversation.system:
        lines += [f"*{conversation.system}*", ""]
    for turn in conversation.turns:
        lines += [f"- {medium.name}" for medium in turn.media]
        lines += ["", *(f"> {line}" for line in turn.question.split("\n")), "", turn.answer, ""]
    return "\n".join(lines)
