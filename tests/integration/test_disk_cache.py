"""Disk entries after a restart are exactly as computed, or absent."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from tests.integration.harness import (
    EngineHarness,
    Served,
    ask,
    conversation,
    load_model,
    new_preparer,
)
from tests.support.disk_writes import wait_until_written
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.support.mechanisms import UNSTORED
from tests.support.whole_run import few_of
from tests.tiny_models.fixtures import TinyModel
from vlm_server.cache.block_hash import BlockHashChain, block_after
from vlm_server.cache.disk.files import default_folder
from vlm_server.cache.disk.store import DiskStore
from vlm_server.cache.prompt_key import MediaSpan, PromptKey
from vlm_server.interfaces import MemoryReading
from vlm_server.protocol import LAST_WRITES_SECONDS, CacheStats, SamplingParams, Submit
from vlm_server.runner import caches as runner_caches
from vlm_server.runner.caches import build_caches, disk_folder
from vlm_server.runner.disk import disk_cache, records
from vlm_server.runner.disk.records import Record, features_record, prefix_record, read_header
from vlm_server.runner.encode.encoder import ImageFeatures
from vlm_server.runner.kv.segments import KVSegment, LayerStates
from vlm_server.settings import CacheSettings

pytestmark = pytest.mark.families("caches", "deepstack")

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LOTS = 64 << 20
QUESTION = "What is on the left of it, and what is below?"
TALK = (
    ("system", ("Answer in short words.",)),
    ("user", ("Look", random_image(1), QUESTION)),
    ("assistant", ("A thing",)),
    ("user", (random_image(2), "and here?")),
)


def talk(turns: int, request_id: str = "") -> Submit:
    return conversation(request_id or f"{turns} turns", *TALK[:turns], sampling=GREEDY)


@contextmanager
def engine_on(
    served: Served,
    folder: Path,
    limit_bytes: int = LOTS,
    is_checked: bool = True,
    prefix_bytes: int = LOTS,
) -> Iterator[EngineHarness]:
    """A new engine with the disk cache in `folder`."""
    settings = CacheSettings(
        max_token_layout_bytes=LOTS,
        max_pixel_bytes=LOTS,
        max_encoder_bytes=LOTS,
        max_prefix_bytes=prefix_bytes,
        max_disk_bytes=limit_bytes,
        disk_folder=str(folder),
    )
    caches = build_caches(settings, MemoryReading(0, 0, 0), served[0])
    engine = EngineHarness(*served, caches=caches)
    caches.begin_serving()
    try:
        yield engine
    finally:
        caches.close(LAST_WRITES_SECONDS)
    if is_checked:
        check_integrity(caches)
    assert caches.num_references == 0


def cached_tokens(engine: EngineHarness, submit: Submit) -> int:
    return engine.ends[submit.request_id].usage.cached_tokens


def disk_of(engine: EngineHarness) -> CacheStats:
    (reading,) = (each for each in engine.caches.stats() if each.name == "disk")
    return reading


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture(scope="session")
def answers_alone(served: Served) -> Callable[[int], list[int]]:
    """Answers of a conversation without any cache."""
    return cache(lambda turns: EngineHarness(*served).answer(talk(turns)))


@pytest.fixture
def qwen(load_tiny: Callable[[str], Served]) -> Served:
    return load_tiny("qwen3_vl")


def test_conversation_is_cached_across_restart(
    served: Served, answers_alone: Callable[[int], list[int]], tmp_path: Path
):
    """As many tokens are cached as with everything in memory."""
    if served[0].family.name in UNSTORED:
        pytest.skip("its KV is not used again")
    with engine_on(served, tmp_path / "of one that runs on") as engine:
        asked = [talk(2), talk(4), talk(4, "again")]
        for submit in asked:
            engine.answer(submit)
        expected = [cached_tokens(engine, submit) for submit in asked]
    assert expected[0] == 0 < expected[2]
    for number, (submit, count) in enumerate(zip(asked, expected, strict=True)):
        with engine_on(served, tmp_path / "of one that restarts") as engine:
            assert engine.answer(submit) == answers_alone(len(submit.messages))
            assert cached_tokens(engine, submit) == count
            reading = disk_of(engine)
            assert bool(reading.hits) == bool(number)
            assert reading.damaged == reading.evictions == 0
    assert not engine.preparers.num_uncached_spans["again"]


def test_image_is_cached_for_other_prompts_across_restart(served: Served, tmp_path: Path):
    plain = EngineHarness(*served)
    with engine_on(served, tmp_path) as engine:
        engine.answer(ask("first", random_image(1), QUESTION, sampling=GREEDY))
    other = ask("second", "Something else", random_image(1), "and what?", sampling=GREEDY)
    with engine_on(served, tmp_path) as engine:
        assert engine.answer(other) == plain.answer(other)
        assert engine.preparers.num_read["second"] == 0


def test_features_on_disk_suffice_for_another_process(
    served: Served, tiny_model: TinyModel, tmp_path: Path
):
    """A model that has encoded nothing lacks attributes that encoding sets."""
    submit = ask("second", "Something else", random_image(1), "and what?", sampling=GREEDY)
    with engine_on(served, tmp_path) as engine:
        engine.answer(ask("first", random_image(1), QUESTION, sampling=GREEDY))
    loaded = load_model(tiny_model(served[0].family.name))
    with engine_on((loaded, new_preparer(loaded)), tmp_path) as engine:
        assert engine.answer(submit) == EngineHarness(*served).answer(submit)
        assert engine.preparers.num_read["second"] == 0


def test_requests_with_different_salts_share_no_disk_files(qwen: Served, tmp_path: Path):
    mine, other = (msgspec.structs.replace(talk(2), cache_salt=salt) for salt in ("mine", "other"))
    with engine_on(qwen, tmp_path) as engine:
        engine.answer(mine)
    with engine_on(qwen, tmp_path) as engine:
        engine.answer(other)
        assert cached_tokens(engine, other) == 0
        assert disk_of(engine).hits == 0


def flip(data: bytes, index: int) -> bytes:
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "an edited number": lambda data: flip(data, len(data) - 3),
    "an edited length of the header": lambda data: flip(data, 6),
    "an edited header": lambda data: data.replace(b"vlm_server", b"vlm_sirver", 1),
    "an edited token": lambda data: flip(data, data.index(b"token_ids") + 30),
    "lengthened": lambda data: data + b"\0",
}


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
@pytest.mark.parametrize("damage", few_of(DAMAGE, list(DAMAGE)[:3]))
def test_damaged_file_is_deleted_and_counted(
    load_tiny: Callable[[str], Served], family: str, damage: str, tmp_path: Path
):
    served = load_tiny(family)
    wanted = EngineHarness(*served).answer(talk(2))
    with engine_on(served, tmp_path) as engine:
        engine.answer(talk(2))
    files = files_in(tmp_path)
    changed = 0
    for path in files:
        data = path.read_bytes()
        if damage == "an edited token" and b"token_ids" not in data:
            path.unlink()
            continue
        path.write_bytes(DAMAGE[damage](data))
        changed += 1
    with engine_on(served, tmp_path) as engine:
        assert engine.answer(talk(2)) == wanted
        assert cached_tokens(engine, talk(2)) == 0
        assert disk_of(engine).hits == 0
    assert disk_of(engine).damaged > 0
    with engine_on(served, tmp_path) as engine:
        assert engine.answer(talk(2)) == wanted
        assert cached_tokens(engine, talk(2)) > 0, "it was written again"


def test_file_of_another_model_is_never_used(
    load_tiny: Callable[[str], Served], qwen: Served, tmp_path: Path
):
    """Neither from its own folder nor moved to this model's."""
    loaded, preparer = qwen
    with engine_on(qwen, tmp_path) as engine:
        wanted = engine.answer(talk(2))
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    other = (replace(loaded, checkpoint=replace(loaded.checkpoint, dtype="another")), preparer)
    with engine_on(other, tmp_path) as engine:
        assert engine.answer(talk(2)) == wanted
        assert cached_tokens(engine, talk(2)) == 0
    (others,) = (path for path in tmp_path.iterdir() if path.is_dir() and path != folder)
    for path in files_in(others):
        path.unlink()
    for path in files_in(folder):
        path.rename(others / path.name)
    with engine_on(other, tmp_path) as engine:
        assert engine.answer(talk(2)) == wanted
        assert cached_tokens(engine, talk(2)) == 0
        assert disk_of(engine).hits == 0, "files hold the fingerprint too"
        assert disk_of(engine).damaged > 0


def test_disk_cache_stays_within_byte_limit_across_restarts(qwen: Served, tmp_path: Path):
    with engine_on(qwen, tmp_path) as engine:
        engine.answer(talk(4))
    needed = sum(path.stat().st_size for path in files_in(tmp_path))
    limit = needed * 3 // 2
    with engine_on(qwen, tmp_path, limit) as engine:
        for number in range(6):
            parts = (f"Number {number}", random_image(10 + number), QUESTION)
            engine.answer(ask(f"{number}", *parts, sampling=GREEDY))
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= limit
    with engine_on(qwen, tmp_path, limit) as engine:
        last = ask("5", *parts, sampling=GREEDY)
        assert engine.answer(last) == EngineHarness(*qwen).answer(last)
        assert cached_tokens(engine, last) > 0


def test_conversation_ends_are_evicted_from_disk_first(qwen: Served, tmp_path: Path):
    turns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    with engine_on(qwen, tmp_path) as engine:
        for number in range(5):
            turns += (("user", (f"Turn {number}: tell me more about that",)),)
            engine.answer(conversation(f"turn {number}", *turns, sampling=GREEDY))
            turns += (("assistant", (engine.texts[f"turn {number}"],)),)
        begun = engine.prompts["turn 2"].num_tokens
    needed = sum(path.stat().st_size for path in files_in(tmp_path))
    with engine_on(qwen, tmp_path, needed + 1000) as engine:
        engine.answer(ask("other", "Something else", sampling=GREEDY))
    with engine_on(qwen, tmp_path, needed + 1000) as engine:
        assert disk_of(engine).entries > 2
        again = conversation("again", *turns[:-1], sampling=GREEDY)
        assert engine.answer(again) == EngineHarness(*qwen).answer(again)
        assert cached_tokens(engine, again) >= begun
        assert engine.prompts["again"].num_tokens > cached_tokens(engine, again) + 1


def test_prefix_larger_than_disk_limit_is_not_stored(qwen: Served, tmp_path: Path):
    with engine_on(qwen, tmp_path, 1000) as engine:
        engine.answer(talk(4))
        assert engine.answer(talk(4, "again")) == EngineHarness(*qwen).answer(talk(4))
    assert files_in(tmp_path) == []


def test_unusable_cache_folder_fails_no_request(qwen: Served, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("mine")
    with engine_on(qwen, path) as engine:
        engine.answer(talk(2))
    assert path.read_text() == "mine"


def test_vanished_cache_folder_is_recreated_and_fails_no_request(qwen: Served, tmp_path: Path):
    folder = tmp_path / "in one" / "gone"
    with engine_on(qwen, folder) as engine:
        engine.answer(talk(2))
    with engine_on(qwen, folder) as engine:
        shutil.rmtree(folder.parent)
        assert engine.answer(talk(4)) == EngineHarness(*qwen).answer(talk(4))
        wait_until_disk_is_written(engine)
        engine.answer(talk(4, "later"))
    with engine_on(qwen, folder) as engine:
        assert engine.answer(talk(4)) == EngineHarness(*qwen).answer(talk(4))
        assert cached_tokens(engine, talk(4)) > 0, "it is stored as before"


class FullDiskStore(DiskStore):
    """A store on a disk with room for `room_bytes`, which fails with `error` beyond."""

    room_bytes = 0
    error = errno.ENOSPC

    def put(self, key: str, write: Callable[[Path], None], keep: Collection[str] = ()) -> list[str]:
        def write_less(path: Path) -> None:
            write(path)
            if path.stat().st_size + self.stats().size_bytes > self.room_bytes:
                raise OSError(self.error, os.strerror(self.error), str(path))

        return super().put(key, write_less, keep)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> type[FullDiskStore]:
    class Own(FullDiskStore):
        pass

    monkeypatch.setattr(runner_caches, "DiskStore", Own)
    return Own


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_evicts_and_warns_once(
    qwen: Served,
    tmp_path: Path,
    full_disk: type[FullDiskStore],
    error: int,
    caplog: pytest.LogCaptureFixture,
):
    full_disk.error, full_disk.room_bytes = error, LOTS
    with engine_on(qwen, tmp_path / "whole") as engine:
        engine.answer(talk(4))
    full_disk.room_bytes = sum(path.stat().st_size for path in files_in(tmp_path / "whole"))
    with engine_on(qwen, tmp_path / "tight") as engine:
        for number in range(6):
            parts = (f"Number {number}", random_image(10 + number), QUESTION)
            engine.answer(ask(f"{number}", *parts, sampling=GREEDY))
            wait_until_disk_is_written(engine)
        assert disk_of(engine).evictions > 0
        assert disk_of(engine).damaged == 0
        assert sum(p.stat().st_size for p in files_in(tmp_path / "tight")) <= full_disk.room_bytes
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    with engine_on(qwen, tmp_path / "tight") as engine:
        last = ask("5", *parts, sampling=GREEDY)
        assert engine.answer(last) == EngineHarness(*qwen).answer(last)
        assert cached_tokens(engine, last) > 0, "what came last is there"


def test_unwritable_disk_warns_once_and_fails_no_request(
    qwen: Served, tmp_path: Path, full_disk: type[FullDiskStore], caplog: pytest.LogCaptureFixture
):
    full_disk.error = errno.EROFS
    with engine_on(qwen, tmp_path) as engine:
        for turns in (2, 4):
            assert engine.answer(talk(turns)) == EngineHarness(*qwen).answer(talk(turns))
            wait_until_disk_is_written(engine)
        assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
        full_disk.room_bytes = LOTS
        engine.answer(talk(4, "again"))
        engine.answer(ask("other", "Something else", random_image(3), sampling=GREEDY))
    assert files_in(tmp_path), "it is used again once it can be"


def no_memory(*_: object) -> NoReturn:
    raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")


def no_host_memory(*_: object) -> NoReturn:
    raise MemoryError


@pytest.mark.parametrize("failing", ["mlx", "host", "descriptors"])
def test_failed_allocation_deletes_no_disk_file(
    qwen: Served, tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
):
    with engine_on(qwen, tmp_path) as engine:
        engine.answer(talk(2))
    before = files_in(tmp_path)
    with engine_on(qwen, tmp_path) as engine, monkeypatch.context() as patch:
        if failing == "mlx":
            patch.setattr(records, "_array", no_memory)
        elif failing == "host":
            patch.setattr(Path, "read_bytes", no_host_memory)
        else:
            patch.setattr(Path, "read_bytes", no_descriptors)
        assert engine.answer(talk(2)) == EngineHarness(*qwen).answer(talk(2))
        assert cached_tokens(engine, talk(2)) == 0
        assert disk_of(engine).damaged == 0
        assert set(before) <= set(files_in(tmp_path))
    with engine_on(qwen, tmp_path) as engine:
        engine.answer(talk(2))
        assert cached_tokens(engine, talk(2)) > 0


def no_descriptors(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_prefix_is_read_file_by_file(qwen: Served, tmp_path: Path):
    """Besides the cache itself, one file at a time is held, for any prompt length."""
    turns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    with engine_on(qwen, tmp_path) as engine:
        for number in range(4):
            turns += (("user", (f"Turn {number}: " + 40 * "tell me more about that ",)),)
            engine.answer(conversation(f"turn {number}", *turns, sampling=GREEDY))
            turns += (("assistant", (engine.texts[f"turn {number}"],)),)
    again = conversation("again", *turns, ("user", ("And?",)), sampling=GREEDY)
    with engine_on(qwen, tmp_path) as engine:
        engine.answer(again)
        (work,) = engine.disk_reader.works
    largest = max(path.stat().st_size for path in files_in(tmp_path))
    assert work.disk_read.transient_bytes == 2 * largest < work.disk_read.size_bytes


def wait_until_disk_is_written(engine: EngineHarness) -> None:
    cache = engine.caches.disk
    assert isinstance(cache, disk_cache.DiskCache)
    wait_until_written(cache)


def test_vanished_disk_files_fail_no_request(qwen: Served, tmp_path: Path):
    with engine_on(qwen, tmp_path) as engine:
        engine.answer(talk(2))
    with engine_on(qwen, tmp_path, is_checked=False) as engine:
        for path in files_in(tmp_path):
            shutil.rmtree(path.parent, ignore_errors=True)
        assert engine.answer(talk(4)) == EngineHarness(*qwen).answer(talk(4))
    with engine_on(qwen, tmp_path) as engine:
        assert engine.answer(talk(4)) == EngineHarness(*qwen).answer(talk(4))
        assert cached_tokens(engine, talk(4)) > 0, "it is stored as before"


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_records_are_read_back_unchanged(dtype: mx.Dtype, tmp_path: Path):
    array = mx.random.normal((1, 2, 3, 8)).astype(dtype)
    states = LayerStates(((array, None), (array + 1,)), (("4", "8"), ()))
    prompt_key = PromptKey(np.arange(3, dtype=np.int32), (MediaSpan(1, 3, "an image"),))
    block = block_after(BlockHashChain("salt"), prompt_key)
    written = prefix_record("f", block, KVSegment((array, array * 2)), states)
    path = tmp_path / "file.safetensors"
    written.write(path)
    assert path.stat().st_size <= written.size_bytes
    assert read_header(path) == written.header
    read = Record.read(path.read_bytes())
    assert read.header == written.header
    assert read.header.is_of("f", block)
    other = block_after(BlockHashChain("other salt"), prompt_key)
    assert not read.header.is_of("f", other)
    assert not read.header.is_of("other", block)
    assert_same([read.segment.arrays], [(array, array * 2)])
    assert read.snapshot.counters == states.counters
    assert_same(read.snapshot.arrays, states.arrays)
    with safe_open(path, framework="numpy") as file:
        assert {"kv.0", "kv.1", "state.0.0", "state.1.0"} == set(file.keys())


@pytest.mark.parametrize("deepstack", [False, True])
def test_features_are_read_back_unchanged(deepstack: bool, tmp_path: Path):
    rows = mx.random.normal((5, 8)).astype(mx.bfloat16)
    mask, layers = mx.array([True, False, True, True, False]), mx.stack([rows, rows])
    features = ImageFeatures(rows, mask, layers) if deepstack else ImageFeatures(rows, None, None)
    written = features_record("f", "an image", features)
    path = tmp_path / "file.safetensors"
    written.write(path)
    assert path.stat().st_size <= written.size_bytes
    read = Record.read(path.read_bytes())
    assert read.header.is_of("f", "an image")
    assert not read.header.is_of("f", "another image")
    assert not read.header.is_of("other", "an image")
    assert_same([read.features.arrays], [features.arrays])


def assert_same(read: Iterable[Iterable[Any]], written: Iterable[Iterable[Any]]) -> None:
    for one, other in zip(read, written, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and mx.array_equal(a, b))


def test_disk_loads_follow_resized_prefix_cache_limit(served: Served, tmp_path: Path):
    """The front may change it while the engine runs."""
    if served[0].family.name in UNSTORED:
        pytest.skip("its KV is not used again")
    with engine_on(served, tmp_path) as engine:
        engine.answer(talk(2))
    with engine_on(served, tmp_path, prefix_bytes=1) as engine:
        engine.answer(talk(2))
        assert cached_tokens(engine, talk(2)) == 0
        engine.caches.prefixes.resize(LOTS)
        again = talk(2, "again")
        engine.answer(again)
        assert cached_tokens(engine, again) > 0
        assert disk_of(engine).hits > 0


def test_relative_disk_path_is_inside_system_cache_folder(tmp_path: Path):
    assert disk_folder(CacheSettings(disk_folder="model-1")) == default_folder() / "model-1"
    assert disk_folder(CacheSettings(disk_folder=str(tmp_path))) == tmp_path
    assert disk_folder(CacheSettings()) == default_folder()
