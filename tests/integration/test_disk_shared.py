"""A conversation that moves to another engine keeps its cached prefix by a shared disk folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from tests.integration.harness import EngineHarness, ask
from tests.integration.test_disk_cache import (
    GREEDY,
    QUESTION,
    Served,
    cached_tokens,
    disk_of,
    engine_on,
    files_in,
    talk,
    wait_until_disk_is_written,
)
from tests.support.images import random_image
from vlm_server.protocol import Submit


@pytest.fixture
def qwen(load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny("qwen3_vl")


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_5"])
def test_conversation_moves_between_engines_by_shared_disk(
    load_tiny: Callable[[str], Served], family: str, tmp_path: Path
):
    """As many tokens are cached as without the moves, and answers equal those without caches."""
    served = load_tiny(family)
    asked = [talk(2), talk(4), talk(4, "again")]
    with engine_on(served, tmp_path / "one that stays") as engine:
        for submit in asked:
            engine.answer(submit)
        expected = [cached_tokens(engine, submit) for submit in asked]
    assert expected[0] == 0 < expected[1]
    with (
        engine_on(served, tmp_path / "shared") as one,
        engine_on(served, tmp_path / "shared") as other,
    ):
        for submit, count, engine in zip(asked, expected, (one, other, one), strict=True):
            assert engine.answer(submit) == EngineHarness(*served).answer(submit)
            assert cached_tokens(engine, submit) == count
            wait_until_disk_is_written(engine)
        assert disk_of(other).hits > 0
        assert disk_of(one).damaged == disk_of(other).damaged == 0
    assert other.preparers.num_uncached_spans[asked[1].request_id] == 1, "the new image"


def test_image_encoded_by_another_engine_is_found_on_disk(qwen: Served, tmp_path: Path):
    other_prompt = ask("second", "Something else", random_image(1), "and what?", sampling=GREEDY)
    wanted = EngineHarness(*qwen).answer(other_prompt)
    with engine_on(qwen, tmp_path) as one, engine_on(qwen, tmp_path) as other:
        one.answer(ask("first", random_image(1), QUESTION, sampling=GREEDY))
        wait_until_disk_is_written(one)
        assert other.answer(other_prompt) == wanted
        assert other.preparers.num_read["second"] == 0


def test_salts_share_nothing_between_engines(qwen: Served, tmp_path: Path):
    mine, theirs = (msgspec.structs.replace(talk(2), cache_salt=salt) for salt in ("mine", "their"))
    with engine_on(qwen, tmp_path) as one, engine_on(qwen, tmp_path) as other:
        one.answer(mine)
        wait_until_disk_is_written(one)
        other.answer(theirs)
        assert cached_tokens(other, theirs) == disk_of(other).hits == 0


def test_prefix_computed_by_two_engines_is_stored_once(qwen: Served, tmp_path: Path):
    """The other engine may or may not have seen the file in time."""
    with engine_on(qwen, tmp_path / "alone") as engine:
        engine.answer(talk(2))
    expected = [path.name.rpartition("-")[0] for path in files_in(tmp_path / "alone")]
    shared = tmp_path / "shared"
    with engine_on(qwen, shared) as one, engine_on(qwen, shared) as other:
        one.answer(talk(2))
        other.answer(talk(2))
        wait_until_disk_is_written(one)
        wait_until_disk_is_written(other)
        assert [path.name.rpartition("-")[0] for path in files_in(shared)] == expected
        other.answer(talk(4))
        wait_until_disk_is_written(other)
        again = talk(4, "again")
        one.answer(again)
        assert cached_tokens(one, again) > cached_tokens(other, talk(4))


def test_prefix_evicted_before_its_disk_read_is_recomputed(
    qwen: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By another engine, between the look-up and the read."""
    wanted = EngineHarness(*qwen).answer(talk(2))
    with engine_on(qwen, tmp_path) as one:
        one.answer(talk(2))
    read_bytes = Path.read_bytes

    def evicted(path: Path) -> bytes:
        if path.suffix == ".safetensors" and str(path).startswith(str(tmp_path)):
            path.unlink(missing_ok=True)
        return read_bytes(path)

    with engine_on(qwen, tmp_path) as engine, monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", evicted)
        assert engine.answer(talk(2)) == wanted
        assert cached_tokens(engine, talk(2)) == 0
        wait_until_disk_is_written(engine)
        assert (disk_of(engine).damaged, disk_of(engine).hits) == (0, 0)


def size_of(folder: Path) -> int:
    """The bytes of its files, without those renamed or evicted meanwhile."""
    size = 0
    for path in files_in(folder):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def test_engines_evicting_each_others_files_answer_as_alone(qwen: Served, tmp_path: Path):
    wanted = [EngineHarness(*qwen).answer(question(number)) for number in range(3)]
    with engine_on(qwen, tmp_path / "one prompt") as engine:
        engine.answer(question(0))
    limit = size_of(tmp_path / "one prompt") * 3 // 2
    with ExitStack() as stack:
        engines = [
            stack.enter_context(engine_on(qwen, tmp_path / "shared", limit, is_checked=False))
            for _ in range(3)
        ]
        for turn in range(2):
            for engine in engines:
                for number in range(3):
                    asked = question(number, f"{turn}")
                    assert engine.answer(asked) == wanted[number]
                    engine.caches.drop()  # only the disk has it
        for engine in engines:
            wait_until_disk_is_written(engine)
        assert size_of(tmp_path / "shared") <= limit
        assert sum(disk_of(engine).evictions for engine in engines) > 3
        assert sum(disk_of(engine).damaged for engine in engines) == 0
    with engine_on(qwen, tmp_path / "shared", limit):
        pass  # and what they leave is sound


def question(number: int, turn: str = "alone") -> Submit:
    return ask(f"{turn} {number}", f"Number {number}", random_image(10 + number), sampling=GREEDY)
