"""A conversation is adapted to the content shapes that each chat template supports."""

from __future__ import annotations

import pytest

from vlm_server.errors import InvalidRequest
from vlm_server.prompt.template.chat import Chat
from vlm_server.prompt.template.templates import ChatTemplate, load_sandboxed
from vlm_server.protocol import ImagePart, Message, TextPart

CONVERSATION = (
    Message("system", (TextPart("be brief"),)),
    Message("user", (TextPart("before"), ImagePart(0), TextPart("after"))),
    Message("assistant", (TextPart("a circle"),)),
    Message("user", (TextPart("sure?"),)),
)
USER_PARTS = (
    "{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
)


def render(body: str) -> str:
    template = "{% for m in messages %}[{{ m.role }}]" + body + "{% endfor %}"
    return ChatTemplate(load_sandboxed(template, {}), ("<image>",), None).render(
        Chat(CONVERSATION), str
    )


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}",
            id="parts-in-every-role",
        ),
        pytest.param(
            USER_PARTS + "{% else %}{{ m.content + '' }}{% endif %}", id="parts-of-users-only"
        ),
        pytest.param("{{ m.content + '' }}", id="strings-only"),
        pytest.param(
            "{% if m.content is string %}{{ m.content }}{% endif %}", id="parts-silently-dropped"
        ),
    ],
)
def test_content_shape_is_adapted_to_template(body: str):
    assert render(body) == (
        "[system]be brief[user]before<image>after[assistant]a circle[user]sure?"
    )


def test_template_exception_is_invalid_request():
    with pytest.raises(InvalidRequest, match="no system role"):
        render(
            "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            "{{ m.content + '' }}"
        )
