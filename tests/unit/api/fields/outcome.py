"""The outcome of a request: the engine's `Submit` and the client's answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx

from tests.unit.api.fields.field import Body, Dialect
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.protocol import Submit

_TIMES = re.compile(r'"(created|created_at|completed_at|\w+_duration)":("[^"]*"|[\d.]+)')


@dataclass(frozen=True)
class Outcome:
    """`submitted` and `told` are equal for requests that are answered alike."""

    status: int
    submitted: tuple[Any, ...]
    told: tuple[str, ...]
    ignored: tuple[str, ...]
    text: str


async def outcome_of(
    client: httpx.AsyncClient, engine: ScriptedEngine, dialect: Dialect, body: Body
) -> Outcome:
    """Send `body`. For a stored response, the client's part includes its input items."""
    before = len(engine.submitted)
    answer = await client.post(dialect.route, json=body)
    client_side = [_told(answer)]
    if "response" in answer.text and '"store":true' in answer.text:
        items = f"{dialect.route}/{re.findall(r'resp_[0-9a-f]+', answer.text)[0]}/input_items"
        client_side.append(_told(await client.get(items), answer.headers["x-request-id"]))
    submitted = engine.submitted[before:]
    named = answer.headers.get("x-vlm-ignored", "")
    return Outcome(
        status=answer.status_code,
        submitted=tuple(
            _of_prompt(submit) if dialect.counts else _of(submit) for submit in submitted
        ),
        told=tuple(client_side),
        ignored=tuple(named.split(", ")) if named else (),
        text=answer.text,
    )


def _told(answer: httpx.Response, request_id: str = "") -> str:
    """The part of an answer that is equal whenever the same request is answered."""
    text = answer.text.replace(request_id or answer.headers["x-request-id"], "ID")
    return _TIMES.sub(r'"\1":0', text)


def _of(submit: Submit) -> tuple[Any, ...]:
    return (
        *(submit.messages, submit.images, submit.videos, submit.sampling),
        *(submit.tools, submit.template, submit.prompt, submit.count_only),
        *(submit.prediction, submit.pooling, submit.inputs),
    )


def _of_prompt(submit: Submit) -> tuple[Any, ...]:
    """The fields a prompt is made of: `prompt.preparer` counts tokens from these only."""
    tools = submit.tools and (submit.tools.definitions, submit.tools.choice)
    return (submit.messages, submit.images, submit.videos, tools, submit.template, submit.prompt)
