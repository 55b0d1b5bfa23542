"""A request in the words of its log line: `demo  182 → 7 tokens (181 cached)  1 picture  0.74 s`.

It is made of the line's fields: names, counts and times, never contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vlm_server.platform.log_lines import Fields

_CLIENT_GONE = 499
_MINUTE = 60_000
_MAX_PLACE_CHARS = 60
_MEDIA = (("images", "picture"), ("videos", "video"), ("documents", "document"))


def summary(fields: Fields) -> str:
    """The line of a request with these fields (`access_log.Entry.fields`)."""
    return "  ".join(part for part in _parts(dict(fields)) if part)


def _parts(fields: dict[str, Any]) -> Iterator[str]:
    yield fields["model"] or f"{fields['method']} {fields['route']}"
    yield _tokens(fields)
    yield ", ".join(_count(fields[name], noun) for name, noun in _MEDIA if fields[name])
    yield _failure(fields)
    yield duration(fields["ms"])
    yield f"key {fields['key']}" if fields["key"] else ""


def _tokens(fields: dict[str, Any]) -> str:
    prompt, written = fields["prompt_tokens"], fields["tokens"]
    if not prompt:
        return ""
    notes = [f"{fields['cached_tokens']} cached"] if fields["cached_tokens"] else []
    notes += ["cut off"] if fields["finish"] == "length" else []
    text = f"{prompt} → {written} tokens" if written else _count(prompt, "token")
    return f"{text} ({', '.join(notes)})" if notes else text


def _failure(fields: dict[str, Any]) -> str:
    """What went wrong: the error's code as words, and the field at fault."""
    code, status = fields["error"], fields["status"]
    if code is None:
        is_gone = status == _CLIENT_GONE or fields["finish"] == "abort"
        return "the client left" if is_gone else ""
    place, number = fields["param"] or "", f" ({status})" if status >= 400 else ""
    if code.startswith(place):  # `model not found` names the field
        place = ""
    if len(place) > _MAX_PLACE_CHARS:
        place = f"{place[:_MAX_PLACE_CHARS]}…"
    return f"failed: {code.replace('_', ' ')}{' in ' if place else ''}{place}{number}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(milliseconds: int) -> str:
    """A time for people: `3 ms`, `0.74 s`, `12.3 s`, `2 min 5 s`."""
    if milliseconds < 100:
        return f"{milliseconds} ms"
    if milliseconds < _MINUTE:
        return f"{milliseconds / 1000:.{2 if milliseconds < 9_995 else 1}f} s"
    minutes, rest = divmod(round(milliseconds / 1000), 60)
    return f"{minutes} min {rest} s"
