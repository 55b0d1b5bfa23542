"""Stores the state of prompts and answers in the prefix cache, as the plan says.

A failure to store, as when memory is short, fails no request. State that sequences computed since
a late error is not stored, for it may be invalid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from vlm_server.cache.kv_storage import KVStorage
from vlm_server.cache.prefix import Source
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.errors import EngineBroken
from vlm_server.interfaces import SeqId
from vlm_server.runner.decode.decode_groups import DecodeGroups
from vlm_server.runner.device.arrays import DeviceErrors
from vlm_server.runner.kv.prompt_kv import PrefixEntry, PromptKV
from vlm_server.runner.prefill.prefill import Prefill

logger = logging.getLogger(__name__)


class PrefixStore(Protocol):
    """The store of prompts' and answers' state: `Caches`."""

    @property
    def kv_storage(self) -> KVStorage:
        """How it stores KV."""

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        """Store the state that `source` has of `prompt`."""


class LateErrors:
    """Errors that sequences' computations raise after their launch; see `DeviceErrors`."""

    def __init__(self, device_errors: DeviceErrors, groups: DecodeGroups) -> None:
        self._device_errors = device_errors
        self._groups = groups
        self._num_of_others = 0
        """Number of late errors so far that did not concern sequences."""
        self._error: Exception | None = None
        """The error that `synchronize` caught since the last `check`."""

    def synchronize(self) -> None:
        """Where errors come late, wait for all computations of sequences."""
        if self._device_errors.are_late and self._error is None:
            try:
                self._groups.synchronize()
            except Exception as error:
                logger.exception("a decode step failed")
                self._error = error

    def attribute_to_others(self) -> None:
        """Count all late errors so far as errors of other work; call `synchronize` first."""
        self._num_of_others = self._device_errors.num_late

    @property
    def is_clean(self) -> bool:
        """Whether no known error makes the sequences' computations invalid."""
        return self._error is None and self._device_errors.num_late == self._num_of_others

    def check(self) -> None:
        """Raises, once, the error that makes the sequences' computations invalid."""
        is_clean, error = self.is_clean, self._error
        self._error = None
        if not is_clean:
            raise error or self._device_errors.last_late


class PrefixWriter:
    """Stores the state of prompts and answers of one `ModelRunner`."""

    def __init__(
        self,
        store: PrefixStore,
        groups: DecodeGroups,
        device_errors: DeviceErrors,
        errors: LateErrors,
    ) -> None:
        self._store = store
        self._groups = groups
        self._device_errors = device_errors
        self._errors = errors

    def store_prompt(self, prompt: PromptKV) -> None:
        """Store a prompt whose sequences have joined."""
        self._write(partial(prompt.entry, is_unused=not self._groups.runs_on(prompt.cache)))

    def store_cancelled(self, prefill: Prefill) -> None:
        """Store a prompt up to where its prefill was cancelled."""
        self._write(prefill.end_cancelled)

    def store_answer(self, seq: SeqId) -> None:
        """Store a sequence that is about to be removed, for the next turn of its conversation."""
        self._write(partial(self._groups.entry, seq))

    def _write(self, make_entry: Callable[[], PrefixEntry | None]) -> None:
        self._errors.synchronize()
        if not self._errors.is_clean:
            return
        try:
            if (entry := make_entry()) is not None:
                source = entry.state.stored_as(
                    self._store.kv_storage, waits_for_copy=self._device_errors.are_late
                )
                self._store.store_prefix(entry.key, source, entry.salt)
        except EngineBroken:
            raise
        except Exception as error:
            self._device_errors.request_error(error, "")
            self._errors.attribute_to_others()
            logger.exception("the state of a prompt can't be stored")
