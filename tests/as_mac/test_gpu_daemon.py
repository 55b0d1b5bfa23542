"""The whole daemon works on Metal's code paths, and survives errors as Metal reports them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.daemons import Daemon, running_daemon, with_settings
from tests.support.images import noise, user
from tests.support.whole_run import few_of

pytestmark = pytest.mark.e2e

POINTS = ("decode", "prefill", "encode", "store")
"""Fault points of `gpu/sitecustomize.py`, which patches every process that imports it."""
KINDS = ("out_of_memory", "step_too_long")
GPU = Path(__file__).parent / "gpu"
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}},
    "required": ["shape"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metal")


@pytest.fixture(scope="module")
def metal(folder: Path) -> Iterator[Daemon]:
    """The daemon on a device that is taken for a Mac's GPU."""
    environment = {"PYTHONPATH": str(GPU), "AS_MAC_FAULT": str(folder / "fault")}
    settings = with_settings("engine.min_restart_backoff_seconds=0.2", "log.level=debug")
    with running_daemon(folder, *settings, environment=environment) as daemon:
        yield daemon


def answer(daemon: Daemon, number: int, **options: Any) -> str:
    """The answer to a question about a new image."""
    options = {"max_tokens": 24, "temperature": 0, **options}
    made = daemon.client().chat.completions.create(
        model="default", messages=[user(noise(number, (96, 64)), "What is this?")], **options
    )
    return made.choices[0].message.content or ""


def restarts(daemon: Daemon) -> int:
    return int(daemon.status()["engine"]["restarts"])


def test_metal_stand_in_is_taken_for_mac(metal: Daemon):
    assert "Apple M1 (stand-in)" in metal.log.read_text()


def test_metal_daemon_answers_images_and_schemas(metal: Daemon):
    assert answer(metal, 1)
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
    }
    assert answer(metal, 2, response_format=response_format) in (
        '{"shape":"circle"}',
        '{"shape":"square"}',
        '{"shape": "circle"}',
        '{"shape": "square"}',
    )
    assert restarts(metal) == 0


@pytest.mark.whole
def test_metal_daemon_answers_concurrent_requests_as_alone(metal: Daemon):
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda number: answer(metal, number), range(10, 16)))
    assert together == [answer(metal, number) for number in range(10, 16)]
    assert restarts(metal) == 0


@pytest.mark.parametrize(
    ("point", "kind"), few_of(product(POINTS, KINDS), {("decode", KINDS[0]), ("prefill", KINDS[1])})
)
def test_late_metal_error_is_reported_or_retried(
    metal: Daemon, folder: Path, point: str, kind: str
):
    number = 100 + 10 * POINTS.index(point) + (kind == "step_too_long")
    (folder / "fault").write_text(f"{point} {kind}")
    if point == "decode":
        with pytest.raises(openai.InternalServerError) as raised:
            answer(metal, number)
        assert (raised.value.status_code, raised.value.code) == (503, kind)
        found = answer(metal, number)
    else:
        found = answer(metal, number)
    assert not (folder / "fault").exists(), "nothing failed"
    assert answer(metal, number) == found, "something wrong was stored"
    assert restarts(metal) == 0
    metal.wait_idle()


@pytest.mark.whole
@pytest.mark.parametrize("point", ["decode", "prefill", "encode"])
def test_aborted_metal_engine_is_restarted(metal: Daemon, folder: Path, point: str):
    before = restarts(metal)
    (folder / "fault").write_text(f"{point} abort")
    with pytest.raises(openai.APIStatusError) as raised:
        answer(metal, 200 + POINTS.index(point))
    assert raised.value.status_code == 502
    metal.wait_ready()
    assert restarts(metal) == before + 1
    assert answer(metal, 300)
