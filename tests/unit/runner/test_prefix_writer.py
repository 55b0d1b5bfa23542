"""After a late error, no prefix is stored, and the error is raised once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vlm_server.cache.kv_storage import KVStorage
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.errors import EngineBroken
from vlm_server.interfaces import SeqId
from vlm_server.runner.device.arrays import DeviceErrors
from vlm_server.runner.kv.prompt_kv import PrefixEntry
from vlm_server.runner.kv.segments import SequenceState
from vlm_server.runner.prefix_writer import LateErrors, PrefixWriter

LATE = RuntimeError("Command buffer execution failed: of somebody")
SEQ = SeqId("a", 0)
KEY = PromptKey(np.arange(4, dtype=np.int32))
ENTRY = PrefixEntry(KEY, SequenceState([], {}), "salt")


class Groups:
    """A stand-in for `DecodeGroups`, of which one sequence has state."""

    error: Exception | None = None

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error

    def entry(self, seq: SeqId) -> PrefixEntry | None:
        return ENTRY if seq == SEQ else None


class Store:
    error: Exception | None = None
    kv_storage = KVStorage(8)

    def __init__(self) -> None:
        self.stored: list[tuple[Any, ...]] = []

    def store_prefix(self, *arguments: Any) -> None:
        if self.error is not None:
            raise self.error
        self.stored.append(arguments)


class WriterHarness:
    def __init__(self, *, errors_are_late: bool = True) -> None:
        self.groups, self.store = Groups(), Store()
        self.device_errors = DeviceErrors(are_late=errors_are_late)
        self.errors = LateErrors(self.device_errors, self.groups)  # type: ignore[arg-type]
        self.writer = PrefixWriter(self.store, self.groups, self.device_errors, self.errors)  # type: ignore[arg-type]


def test_answers_of_known_sequences_are_stored_and_others_ignored():
    ground = WriterHarness()
    ground.writer.store_answer(SEQ)
    ground.writer.store_answer(SeqId("gone", 0))
    assert ground.store.stored == [ENTRY]


def test_late_step_error_stores_nothing_and_is_raised_once():
    ground = WriterHarness()
    ground.groups.error = LATE
    ground.writer.store_answer(SEQ)
    assert not ground.store.stored
    with pytest.raises(RuntimeError, match="of somebody"):
        ground.errors.check()
    ground.errors.check()
    ground.groups.error = None
    ground.writer.store_answer(SEQ)
    assert ground.store.stored


def test_late_error_met_elsewhere_is_attributed_to_running_sequences():
    ground = WriterHarness()
    ground.device_errors.request_error(LATE, "")
    ground.writer.store_answer(SEQ)
    assert not ground.store.stored
    with pytest.raises(type(ground.device_errors.last_late)):
        ground.errors.check()


def test_late_error_after_synchronization_is_not_attributed_to_sequences():
    ground = WriterHarness()
    ground.device_errors.request_error(LATE, "")
    ground.errors.attribute_to_others()
    ground.errors.check()
    ground.writer.store_answer(SEQ)
    assert ground.store.stored


def test_synchronize_is_skipped_where_errors_come_at_once():
    ground = WriterHarness(errors_are_late=False)
    ground.groups.error = LATE
    ground.errors.synchronize()
    ground.errors.check()


def test_unstorable_state_fails_no_request():
    ground = WriterHarness()
    ground.store.error = LATE
    ground.writer.store_answer(SEQ)
    ground.errors.check()


def test_engine_broken_error_is_raised_by_prefix_writer():
    ground = WriterHarness()
    ground.store.error = EngineBroken("a rank is gone")
    with pytest.raises(EngineBroken):
        ground.writer.store_answer(SEQ)
