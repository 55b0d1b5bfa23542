"""Every field of every dialect works, is reported or is refused, as its declaration says."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from tests.unit.api.fields.concepts import CONCEPTS
from tests.unit.api.fields.dialects import DIALECTS
from tests.unit.api.fields.field import (
    STORED,
    STORED_PDF,
    Body,
    Dialect,
    Field,
    Reading,
    has,
    removed,
    with_and_without,
)
from tests.unit.api.fields.outcome import Outcome, outcome_of
from tests.unit.api.fields.structs import paths_of
from tests.unit.api.scripted_engine import ScriptedEngine, ended, finished

TWO_ANSWERS = (ended(), ended(choice=1), finished())
Check = Callable[["Trial", Field], Awaitable[None]]
by_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=str)


class Trial:
    """Sends requests with and without a field.

    `known` are outcomes of requests without a field, by their bodies: many fields share them.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        engine: ScriptedEngine,
        dialect: Dialect,
        field: Field,
        known: dict[bytes, Outcome],
    ) -> None:
        self._client, self._engine = client, engine
        self._dialect, self._field, self._known = dialect, field, known

    async def send(self, body: Body) -> Outcome:
        has_two = body.get("n") == 2 and not self._dialect.counts
        self._engine.script = TWO_ANSWERS if has_two else self._dialect.script
        return await outcome_of(self._client, self._engine, self._dialect, body)

    async def with_value(self, value: Any) -> Outcome:
        return await self.send((await self._bodies(value))[0])

    async def without(self) -> Outcome:
        """The outcome of the request without the field."""
        body = (await self._bodies(None))[1]
        return await self.send(removed(body, self._field.path))

    async def with_and_without(self) -> tuple[Outcome, Outcome]:
        """Outcomes with and without the field; the latter must be equal when repeated."""
        with_value, without = await self._bodies(self._field.value)
        first = await self._usual(without)
        assert has(without, self._field.path) or self._field.name not in first.ignored
        return await self.send(with_value), first

    async def _usual(self, body: Body) -> Outcome:
        key = msgspec.json.encode(body)
        if key not in self._known:
            first, second = await self.send(body), await self.send(body)
            assert first.status == 200, first.text
            assert alike(first) == alike(second)
            self._known[key] = first
        return self._known[key]

    async def _bodies(self, value: Any) -> tuple[Body, Body]:
        field = self._field
        resolved = await value(self._client) if callable(value) else value
        body = self._dialect.usual if field.on is None else field.on
        return with_and_without(body, field.path, resolved)


def alike(outcome: Outcome) -> tuple[Any, ...]:
    """The parts of an outcome that are equal for requests answered alike."""
    return outcome.status, outcome.submitted, outcome.told


# ---- declarations ----------------------------------------------------------------------


async def works(trial: Trial, field: Field) -> None:
    with_value, without = await trial.with_and_without()
    assert with_value.status == (field.fails or 200), with_value.text
    assert field.name not in with_value.ignored
    if field.of_answer:
        assert with_value.submitted == without.submitted
        assert with_value.told != without.told
    elif field.fails is None:
        assert with_value.submitted != without.submitted


async def has_no_effect(trial: Trial, field: Field) -> None:
    with_value, without = await trial.with_and_without()
    assert with_value.status == 200, with_value.text
    assert field.name in with_value.ignored
    assert with_value.submitted == without.submitted
    for value in field.neutral:
        outcome = await trial.with_value(value)
        assert (outcome.status, field.name in outcome.ignored) == (200, False), outcome.text


async def is_refused(trial: Trial, field: Field) -> None:
    with_value, without = await trial.with_and_without()
    assert (with_value.status, with_value.submitted) == (400, ())
    error = re.sub(r"\[\d+\]", "[]", with_value.text)
    assert f"`{field.name}`" in error or f'"param":"{field.name}"' in error
    for value in field.neutral:
        assert alike(await trial.with_value(value)) == alike(without), value


async def may_be_null(trial: Trial, field: Field) -> None:
    with_null, without = await trial.with_value(None), await trial.without()
    assert alike(with_null) == alike(without)
    assert with_null.ignored == without.ignored


# ---- tests of every field --------------------------------------------------------------


async def check_all(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    dialect: Dialect,
    fields: Iterable[Field],
    check: Check,
) -> None:
    """Check each field; the error names those that fail, and why."""
    for content in (STORED, STORED_PDF):
        await client.put("/v1/media", content=content)
    wrong = {}
    known = dict[bytes, Outcome]()
    for field in fields:
        try:
            await check(Trial(client, engine, dialect, field, known), field)
        except AssertionError as error:
            wrong[field.path] = str(error)
    assert wrong == {}


def read_as(dialect: Dialect, reading: Reading) -> list[Field]:
    return [field for field in dialect.fields if field.reading is reading]


@by_dialect
async def test_working_fields_change_request(
    client: httpx.AsyncClient, engine: ScriptedEngine, dialect: Dialect
) -> None:
    await check_all(client, engine, dialect, read_as(dialect, Reading.WORKS), works)


@by_dialect
async def test_ineffective_fields_are_reported(
    client: httpx.AsyncClient, engine: ScriptedEngine, dialect: Dialect
) -> None:
    await check_all(client, engine, dialect, read_as(dialect, Reading.IGNORED), has_no_effect)


@by_dialect
async def test_refused_fields_are_named(
    client: httpx.AsyncClient, engine: ScriptedEngine, dialect: Dialect
) -> None:
    await check_all(client, engine, dialect, read_as(dialect, Reading.REFUSED), is_refused)


@by_dialect
async def test_null_equals_absent_for_optional_fields(
    client: httpx.AsyncClient, engine: ScriptedEngine, dialect: Dialect
) -> None:
    places = paths_of(*dialect.structs)
    declared = {field.declared: field for field in dialect.fields}
    optional = [
        field for path, field in declared.items() if path in places and not places[path].is_required
    ]
    await check_all(client, engine, dialect, optional, may_be_null)


@by_dialect
def test_every_request_field_is_declared(dialect: Dialect) -> None:
    paths = paths_of(*dialect.structs)
    declared = {field.declared: field for field in dialect.fields}
    leaves = {path for path, place in paths.items() if place.is_leaf} | dialect.more
    assert {path for path in leaves if not is_declared(path, dialect)} == set()
    working = {path for path, field in declared.items() if field.reading is Reading.WORKS}
    free = {path for path in working if path.startswith("chat_template_kwargs.")}
    assert working - free - paths.keys() == set()


def is_declared(path: str, dialect: Dialect) -> bool:
    """Whether a declaration covers the path, or an ineffective object around it."""
    return any(
        field.declared == path
        or (
            field.reading is Reading.IGNORED
            and path.startswith((f"{field.declared}{{", f"{field.declared}."))
        )
        for field in dialect.fields
    )


@by_dialect
def test_every_declared_field_has_listed_concept(dialect: Dialect) -> None:
    assert {field.concept for field in dialect.fields} - CONCEPTS == set()


@pytest.mark.parametrize(
    ("path", "reading", "check"),
    [
        ("user", Reading.WORKS, works),
        ("temperature", Reading.IGNORED, has_no_effect),
        ("temperature", Reading.REFUSED, is_refused),
        ("store", Reading.IGNORED, has_no_effect),
    ],
)
async def test_wrong_field_declarations_fail_their_check(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, reading: Reading, check: Check
) -> None:
    dialect = DIALECTS[0]
    (right,) = (field for field in dialect.fields if field.path == path)
    wrong = replace(right, reading=reading, neutral=())
    with pytest.raises(AssertionError):
        await check_all(client, engine, dialect, [wrong], check)
