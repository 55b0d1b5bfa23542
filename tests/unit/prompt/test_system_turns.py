"""Messages in any order of roles reach the prompt, folded into turns that the template has."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.prompt.test_tool_prompts import ALL, ASK, CALL, RESULT, render
from vlm_server.errors import InvalidRequest
from vlm_server.prompt.template.chat import fold_system
from vlm_server.protocol import ImagePart, Message, TextPart


def text_message(role: str, text: str) -> Message:
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
def test_messages_of_any_role_order_reach_prompt_in_order(
    source: str, roles: tuple[str, ...]
) -> None:
    texts = [f"text-{index}" for index in range(len(roles))]
    prompt = render(source, *map(text_message, roles, texts))
    places = [prompt.find(text) for text in texts]
    assert min(places) >= 0
    assert places == sorted(places)


def test_system_message_stays_if_template_supports_it() -> None:
    messages = (
        text_message("system", "a"),
        text_message("user", "b"),
        text_message("system", "c"),
        text_message("user", "d"),
    )
    assert fold_system(messages, takes_first=True, takes_later=True) == messages


def test_system_message_joins_neighbouring_user_turns() -> None:
    image = Message("user", (ImagePart(0),))
    messages = (
        text_message("system", "a"),
        image,
        text_message("system", "b"),
        text_message("user", "c"),
    )
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
def test_user_message_after_tool_result_is_rendered(source: str, roles: tuple[str, ...]) -> None:
    texts = [f"text-{index}" for index in range(len(roles))]
    prompt = render(source, ASK, CALL, RESULT, *map(text_message, roles, texts))
    places = [prompt.find(text) for text in ("clicked", *texts)]
    assert min(places) >= 0
    assert places == sorted(places)


def test_second_system_message_joins_first() -> None:
    messages = (text_message("system", "a"), text_message("system", "b"), text_message("user", "c"))
    system, user = fold_system(messages, takes_first=True, takes_later=False)
    assert (system.role, system.content) == (
        "system",
        (TextPart("a"), TextPart("\n\n"), TextPart("b")),
    )
    assert user == messages[2]


def test_assistant_text_after_tool_call_stays_in_place() -> None:
    messages = (ASK, CALL, text_message("assistant", "text"), text_message("user", "b"))
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
def test_message_refused_by_template_is_named(roles: tuple[str, ...], param: str) -> None:
    """Also if several messages were folded into one."""
    reason = "{{ raise_exception('the user begins') }}"
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and (loop.first or "
        "loop.previtem.role == 'system') %}" + reason + "{% endif %}{{ m.content + '' }}"
        "{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="the user begins") as caught:
        render(
            source,
            *placed(*(text_message(role, "a") for role in roles), text_message("assistant", "b")),
        )
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


def test_template_failure_without_culprit_names_messages_field() -> None:
    source = "{% for m in messages %}{{ m.content + 1 if messages | length > 1 }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="the conversation") as caught:
        render(
            source,
            *placed(
                text_message("user", "a"), text_message("assistant", "b"), text_message("user", "c")
            ),
        )
    assert caught.value.param == "messages"
