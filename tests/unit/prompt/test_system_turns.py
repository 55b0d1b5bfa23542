"""What is said reaches the model, in whatever order of roles, wherever the template has a place."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.prompt.test_tool_prompts import ALL, ASK, CALL, RESULT, render
from vlm_server.errors import InvalidRequest
from vlm_server.prompt.template.chat import fold_system
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
        ("user", "user"),
        ("system", "system", "user", "user"),
        ("user", "system", "user"),
        ("user", "assistant", "assistant", "user"),
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


@pytest.mark.parametrize("source", ALL.values(), ids=ALL)
@pytest.mark.parametrize("roles", [("user",), ("system", "user"), ("user", "user")])
def test_after_a_result_the_user_may_speak(source: str, roles: tuple[str, ...]) -> None:
    texts = [f"text-{index}" for index in range(len(roles))]
    prompt = render(source, ASK, CALL, RESULT, *map(said, roles, texts))
    places = [prompt.find(text) for text in ("clicked", *texts)]
    assert min(places) >= 0
    assert places == sorted(places)


def test_a_second_system_message_is_part_of_the_first() -> None:
    messages = (said("system", "a"), said("system", "b"), said("user", "c"))
    told, asked = fold_system(messages, takes_first=True, takes_later=False)
    assert (told.role, told.content) == (
        "system",
        (TextPart("a"), TextPart("\n\n"), TextPart("b")),
    )
    assert asked == messages[2]


def test_what_is_said_after_a_call_stays_behind_it() -> None:
    messages = (ASK, CALL, said("assistant", "text"), said("user", "b"))
    assert fold_system(messages, takes_first=True, takes_later=True) == messages


def placed(*messages: Message) -> list[Message]:
    return [replace(each, param=f"messages[{i}]") for i, each in enumerate(messages)]


@pytest.mark.parametrize(
    ("roles", "param"),
    [
        (("assistant", "user"), "messages[0]"),
        (("system", "assistant", "user"), "messages[1]"),
        (("system", "system", "assistant", "user"), "messages[2]"),
    ],
)
def test_what_is_refused_is_named(roles: tuple[str, ...], param: str) -> None:
    """Also where several messages became one."""
    reason = "{{ raise_exception('the user begins') }}"
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and (loop.first or "
        "loop.previtem.role == 'system') %}" + reason + "{% endif %}{{ m.content + '' }}"
        "{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="the user begins") as caught:
        render(source, *placed(*(said(role, "a") for role in roles), said("assistant", "b")))
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


def test_what_fails_for_another_reason_names_the_field_alone() -> None:
    source = "{% for m in messages %}{{ m.content + 1 if messages | length > 1 }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="the conversation") as caught:
        render(source, *placed(said("user", "a"), said("assistant", "b"), said("user", "c")))
    assert caught.value.param == "messages"
