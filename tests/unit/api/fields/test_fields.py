"""Every field of every dialect does what is declared of it: it works, is named, or is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.unit.api.fields.concepts import CONCEPTS
from tests.unit.api.fields.dialects import DIALECTS
from tests.unit.api.fields.field import (
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
CASES = [(dialect, field) for dialect in DIALECTS for field in dialect.fields]


def cases(reading: Reading) -> Any:
    """One for each field that is read so."""
    chosen = [each for each in CASES if each[1].reading is reading]
    ids = [f"{dialect}-{field.path}" for dialect, field in chosen]
    return pytest.mark.parametrize(("dialect", "field"), chosen, ids=ids)


class Trial:
    """Sends requests with and without a field."""

    def __init__(
        self, client: httpx.AsyncClient, engine: ScriptedEngine, dialect: Dialect, field: Field
    ) -> None:
        self._client, self._engine = client, engine
        self._dialect, self._field = dialect, field

    async def send(self, body: Body) -> Outcome:
        has_two = body.get("n") == 2 and not self._dialect.counts
        self._engine.script = TWO_ANSWERS if has_two else self._dialect.script
        return await outcome_of(self._client, self._engine, self._dialect, body)

    async def given(self, value: Any) -> Outcome:
        return await self.send((await self._bodies(value))[0])

    async def without(self) -> Outcome:
        """Of the request that has all but the field."""
        body = (await self._bodies(None))[1]
        return await self.send(removed(body, self._field.path))

    async def with_and_without(self) -> tuple[Outcome, Outcome]:
        """The same request is answered alike when it comes again, or no difference would count."""
        with_value, without = await self._bodies(self._field.value)
        first, second = await self.send(without), await self.send(without)
        assert first.status == 200, first.text
        assert alike(first) == alike(second)
        assert has(without, self._field.path) or self._field.name not in first.ignored
        return await self.send(with_value), first

    async def _bodies(self, value: Any) -> tuple[Body, Body]:
        field = self._field
        given = await value(self._client) if callable(value) else value
        body = self._dialect.usual if field.on is None else field.on
        return with_and_without(body, field.path, given)


def alike(outcome: Outcome) -> tuple[Any, ...]:
    """What is to be the same, or not."""
    return outcome.status, outcome.submitted, outcome.told


@pytest.fixture
def trial(
    client: httpx.AsyncClient, engine: ScriptedEngine, dialect: Dialect, field: Field
) -> Trial:
    return Trial(client, engine, dialect, field)


@cases(Reading.WORKS)
async def test_a_field_that_works_changes_something(trial: Trial, field: Field) -> None:
    with_value, without = await trial.with_and_without()
    assert with_value.status == (field.fails or 200), with_value.text
    assert field.name not in with_value.ignored
    if field.of_answer:
        assert with_value.submitted == without.submitted
        assert with_value.told != without.told
    elif field.fails is None:
        assert with_value.submitted != without.submitted


@cases(Reading.IGNORED)
async def test_a_field_without_effect_is_named(trial: Trial, field: Field) -> None:
    with_value, without = await trial.with_and_without()
    assert with_value.status == 200, with_value.text
    assert field.name in with_value.ignored
    assert with_value.submitted == without.submitted
    for value in field.neutral:
        outcome = await trial.given(value)
        assert (outcome.status, field.name in outcome.ignored) == (200, False), outcome.text


@cases(Reading.REFUSED)
async def test_a_field_that_is_refused_is_named(trial: Trial, field: Field) -> None:
    with_value, without = await trial.with_and_without()
    assert (with_value.status, with_value.submitted) == (400, ())
    error = re.sub(r"\[\d+\]", "[]", with_value.text)
    assert f"`{field.name}`" in error or f'"param":"{field.name}"' in error
    for value in field.neutral:
        assert alike(await trial.given(value)) == alike(without), value


OPTIONAL = [
    (dialect, field)
    for dialect in DIALECTS
    for field in {each.declared: each for each in dialect.fields}.values()
    for place in [paths_of(*dialect.structs).get(field.declared)]
    if place is not None and not place.is_required
]


@pytest.mark.parametrize(
    ("dialect", "field"), OPTIONAL, ids=[f"{dialect}-{field.path}" for dialect, field in OPTIONAL]
)
async def test_null_is_as_good_as_nothing(trial: Trial, field: Field) -> None:
    with_null, without = await trial.given(None), await trial.without()
    assert alike(with_null) == alike(without)
    assert with_null.ignored == without.ignored


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_every_field_of_a_request_is_declared(dialect: Dialect) -> None:
    paths = paths_of(*dialect.structs)
    declared = {field.declared: field for field in dialect.fields}
    leaves = {path for path, place in paths.items() if place.is_leaf} | dialect.more
    assert {path for path in leaves if not is_declared(path, dialect)} == set()
    working = {path for path, field in declared.items() if field.reading is Reading.WORKS}
    free = {path for path in working if path.startswith("chat_template_kwargs.")}
    assert working - free - paths.keys() == set()


def is_declared(path: str, dialect: Dialect) -> bool:
    """Whether there is a row of it, or of an object around it that has no effect."""
    return any(
        field.declared == path
        or (
            field.reading is Reading.IGNORED
            and path.startswith((f"{field.declared}{{", f"{field.declared}."))
        )
        for field in dialect.fields
    )


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_every_field_is_about_something_that_is_listed(dialect: Dialect) -> None:
    assert {field.concept for field in dialect.fields} - CONCEPTS == set()


@pytest.mark.parametrize(
    ("path", "reading", "check"),
    [
        ("user", Reading.WORKS, test_a_field_that_works_changes_something),
        ("temperature", Reading.IGNORED, test_a_field_without_effect_is_named),
        ("temperature", Reading.REFUSED, test_a_field_that_is_refused_is_named),
        ("store", Reading.IGNORED, test_a_field_without_effect_is_named),
    ],
)
async def test_a_wrong_declaration_is_noticed(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str, reading: Reading, check: Any
) -> None:
    dialect = DIALECTS[0]
    (right,) = (field for field in dialect.fields if field.path == path)
    wrong = replace(right, reading=reading, neutral=())
    with pytest.raises(AssertionError):
        await check(Trial(client, engine, dialect, wrong), wrong)
