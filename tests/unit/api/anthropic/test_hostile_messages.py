"""Whatever stands in a request, it is answered or refused by name; the server never fails."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.unit.api.anthropic.steps import (
    LOOK,
    PICTURE,
    ROUTE,
    assistant,
    call,
    request,
    result,
    text,
    user,
)

THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
WHOLE = request(
    user(text(), PICTURE),
    assistant(THOUGHT, text(), call(screen=1)),
    user(result(text(), PICTURE)),
    system=[text("Be brief.")],
    tools=[
        LOOK,
        {"type": "computer_20251124", "name": "c", "display_width_px": 9, "display_height_px": 9},
    ],
    tool_choice={"type": "tool", "name": "look"},
    thinking={"type": "enabled", "budget_tokens": 9},
    output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    stop_sequences=["x"],
    temperature=1,
    stream=False,
)
ODD: list[Any] = [
    None, True, -1, 0, 10**400, 1e300, "", "\ud800", "data:", [], [[]], [None], {},
    {"type": "text"}, {"type": []}, {"": {}},
]  # fmt: skip
Path = tuple[str | int, ...]


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(inner, (*path, key))


def changed(path: Path, value: Any) -> dict[str, Any]:
    body = copy.deepcopy(WHOLE)
    *way, last = path
    place: Any = body
    for key in way:
        place = place[key]
    place[last] = value
    return body


def test_the_request_has_all_that_is_changed() -> None:
    assert len(list(paths(WHOLE))) > 70


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
async def test_one_odd_value_anywhere(client: httpx.AsyncClient, odd: Any) -> None:
    for path in paths(WHOLE):
        answer = await client.post(
            ROUTE,
            content=json.dumps(changed(path, odd)),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code in (200, 400, 404), (path, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["type"] in ("invalid_request_error", "not_found_error")
            assert "\ud800" not in error["message"]


async def test_the_whole_is_answered(client: httpx.AsyncClient) -> None:
    assert (await client.post(ROUTE, json=WHOLE)).status_code == 200
