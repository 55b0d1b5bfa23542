"""What a system message says reaches the model, wherever the template has a place for it."""

from __future__ import annotations

import pytest

from tests.unit.prompt.test_tool_prompts import ALL, render
from vlm_server.prompt.system_turns import fold_system
from vlm_server.protocol import ImagePart, Message, TextPart


def said(role: str, text: str) -> Message:
    return Message(role, (TextPart(text),))  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ALL.values(), ids=ALL)
@pytest.mark.parametrize(
    "roles",
    [
        ("system", "user"),
        ("system", "user", "assistant", "system", "user"),
        ("user", "system"),
        ("user", "system", "assistant", "user"),
        ("system", "system", "user"),
        ("user", "assistant", "system"),
    ],
)
def test_nothing_is_lost_or_refused(source: str, roles: tuple[str, ...]) -> None:
    texts = [f"text-{index}" for index in range(len(roles))]
    prompt = render(source, *map(said, roles, texts))
    places = [prompt.find(text) for text in texts]
    assert min(places) >= 0
    assert places == sorted(places)


def test_where_it_has_a_place_it_stays() -> None:
    messages = (said("system", "a"), said("user", "b"), said("system", "c"), said("user", "d"))
    assert fold_system(messages, takes_first=True, takes_later=True) == messages


def test_it_joins_the_users_turns_beside_it() -> None:
    picture = Message("user", (ImagePart(0),))
    messages = (said("system", "a"), picture, said("system", "b"), said("user", "c"))
    (folded,) = fold_system(messages, takes_first=False, takes_later=False)
    gap = TextPart("\n\n")
    assert folded.content == (
        TextPart("a"),
        gap,
        ImagePart(0),
        gap,
        TextPart("b"),
        gap,
        TextPart("c"),
    )


def test_two_turns_of_a_user_stay_two() -> None:
    messages = (said("user", "a"), said("user", "b"))
    assert fold_system(messages, takes_first=False, takes_later=False) == messages
