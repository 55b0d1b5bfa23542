"""The disk cache: features and KV on disk, beneath the caches in memory.

The inference thread only enqueues; a writer thread writes, and the disk reader thread reads. A
failed write or read is a miss, and fails no request. Other engines may use the folder: each look-up
of a prompt indexes what they have written.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from vlm_server.cache.block_hash import KVBlock, KVBlockIndex, block_after
from vlm_server.cache.disk.folder import is_gone
from vlm_server.cache.disk.store import DiskStore, is_transient
from vlm_server.cache.disk.tier import DiskTier, EncodedImage, StoredPrefixSizes
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.cache.lru import InspectableCache
from vlm_server.cache.prefix import Source
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.errors import OutOfMemory
from vlm_server.runner.device.arrays import is_out_of_memory
from vlm_server.runner.disk import records
from vlm_server.runner.disk.disk_writer import DiskWriter, WriteJob
from vlm_server.runner.disk.records import Record, StoredPrefix
from vlm_server.runner.encode.encoder import ImageFeatures
from vlm_server.runner.kv.segments import KVSegment, LayerStates

logger = logging.getLogger(__name__)


class DiskCache(DiskTier):
    """The `DiskTier` of one model."""

    def __init__(
        self,
        store: DiskStore,
        fingerprint: str,
        prefix_bytes: Callable[[], int],
        *,
        needs_snapshots: bool,
        kv_storage: KVStorage = EXACT,
    ) -> None:
        """prefix_bytes: limit of a prompt's loaded KV. needs_snapshots: see `PrefixCache`.

        kv_storage: of KV to store; KV that was stored in another way is never found.
        """
        self._store = store
        self._fingerprint = fingerprint
        self._prefix_bytes = prefix_bytes
        self._needs_snapshots = needs_snapshots
        self._namespace = kv_storage.namespace
        self._lock = threading.Lock()
        self._catching_up = threading.Lock()
        """Held while headers are read; acquired before `_lock`."""
        self._blocks = KVBlockIndex(whole_blocks=needs_snapshots)
        self.writer = DiskWriter(store, self._drop)
        self._catch_up()

    @property
    def caches(self) -> tuple[InspectableCache, ...]:
        return (self._store,)

    def close(self, seconds: float) -> None:
        self.writer.close(seconds)

    def store_features(self, key: str, features: EncodedImage) -> None:
        assert isinstance(features, ImageFeatures)
        file_key = self._features_key(key)
        with self._lock:
            is_stored = self._is_known(file_key)
        if not is_stored and features.size_bytes <= self.writer.room_bytes:
            record = records.features_record(self._fingerprint, key, features)
            self.writer.add(WriteJob(file_key, record))

    def find_features(self, key: str) -> int | None:
        size_bytes = self._store.size_of(self._features_key(key))
        if size_bytes is None:
            self._store.count_miss()
        return size_bytes

    def read_features(self, key: str) -> ImageFeatures | None:
        file_key = self._features_key(key)
        if (record := self._read(file_key, key)) is None:
            return None
        self._store.touch([file_key])
        return record.features

    def store_prefix(
        self, prompt: PromptKey, source: Source[KVSegment, LayerStates], salt: str
    ) -> None:
        with self._lock:
            walk = self._blocks.walk(prompt, len(prompt), self._namespace + salt, self._is_known)
        start, parent_keys = walk.length, walk.keys
        for end in self._ends(prompt, source, start):
            snapshot = source.snapshots[end] if self._needs_snapshots else None
            size_bytes = source.size_bytes(start, end) + (snapshot.size_bytes if snapshot else 0)
            if end <= start or size_bytes > self.writer.room_bytes:
                return
            block = block_after(walk.chain, prompt.part(start, end))
            segment = source.take(start, end)
            record = records.prefix_record(self._fingerprint, block, segment, snapshot)
            with self._lock:
                self._blocks.add(block)
                self.writer.add(WriteJob(block.key, record, parent_keys))
            start, parent_keys = end, (*parent_keys, block.key)

    def find_prefix(
        self, prompt: PromptKey, start: int, limit: int, salt: str, min_length: int
    ) -> StoredPrefixSizes | None:
        if start < min(limit, len(prompt)):
            self._catch_up()
        length, sizes, most_bytes = start, list[int](), self._prefix_bytes()
        for block, at, count in self._blocks_after(prompt, start, limit, salt):
            size_bytes = self._store.size_of(block.key)
            if size_bytes is None or sum(sizes) + size_bytes > most_bytes:
                break
            sizes.append(size_bytes)
            length = at + count
        if length <= start or length < min_length:
            self._store.count_miss()
            return None
        return StoredPrefixSizes(length, sum(sizes), max(sizes))

    def read_prefix(
        self, prompt: PromptKey, start: int, limit: int, salt: str
    ) -> Iterator[StoredPrefix]:
        keys = list[str]()
        for block, at, count in self._blocks_after(prompt, start, limit, salt):
            if (record := self._read(block.key, block)) is None:
                break
            keys.append(block.key)
            yield StoredPrefix(at, record.segment, count, record.snapshot)
            del record  # frees it while the next record is read
        self._store.touch(reversed(keys))

    # ---- reading -------------------------------------------------------------------

    def _blocks_after(
        self, prompt: PromptKey, start: int, limit: int, salt: str
    ) -> list[tuple[KVBlock, int, int]]:
        """The blocks of `prompt` that end beyond its first `start` positions, in order.

        Each with its first position and its number of matching positions.
        """
        with self._lock:
            is_stored = self._store.__contains__
            walk = self._blocks.walk(prompt, limit, self._namespace + salt, is_stored)
        blocks, at = [], 0
        for block, count in walk.blocks:
            if at + count > start:
                blocks.append((block, at, count))
            at += count
        return blocks

    def _read(self, key: str, subject: str | KVBlock) -> Record | None:
        """The record of `subject`; None if it is missing or unusable, which deletes it.

        Raises OutOfMemory, and keeps the file.
        """
        try:
            data = self._store.get(key)
        except OSError as error:
            logger.warning("a cache file can't be read now: %s", error.strerror)
            return None
        if data is not None:
            try:
                record = Record.read(data)
                if record.header.is_of(self._fingerprint, subject):
                    return record
            except (MemoryError, *records.UNREADABLE) as error:
                if is_out_of_memory(error):
                    raise OutOfMemory(str(error)) from error
                logger.debug("a cache file can't be parsed", exc_info=True)
            self._store.discard(key)
        self._drop([key])
        return None

    def _catch_up(self) -> None:
        """Index new blocks of all engines, and drop deleted ones."""
        with self._catching_up:
            new_keys, removed_keys = self._store.refresh()
            self._drop(removed_keys)
            for key in new_keys:
                if key.startswith("prefix-"):
                    self._read_header(key)

    def _read_header(self, key: str) -> None:
        """Index a block, or delete its file if that is invalid."""
        if (path := self._store.path(key)) is None:
            return
        try:
            header = records.read_header(path)
        except (MemoryError, *records.UNREADABLE) as error:
            if is_transient(error) or is_gone(error):
                return
            header = None
        if isinstance(header, records.PrefixHeader) and header.kv_is_valid(self._fingerprint, key):
            with self._lock:
                self._blocks.add(header.block)
        else:
            self._store.discard(key)

    # ---- writing -------------------------------------------------------------------

    def _is_known(self, key: str) -> bool:
        """Whether `key` is stored or waits to be written. Needs the lock."""
        return key in self.writer or key in self._store

    def _ends(
        self, prompt: PromptKey, source: Source[KVSegment, LayerStates], start: int
    ) -> list[int]:
        if self._needs_snapshots:
            return sorted(position for position in source.snapshots if position > start)
        max_tokens = self.writer.room_bytes // source.size_bytes(0, 1)
        return [prompt.floor(min(start + max_tokens, len(prompt)))]

    def _features_key(self, key: str) -> str:
        """The file key of an image's features by this model."""
        return f"features-{hashlib.sha256(f'{self._fingerprint} {key}'.encode()).hexdigest()}"

    def _drop(self, keys: Iterable[str]) -> None:
        """Drop blocks from the index, except those stored or queued again."""
        with self._lock:
            self._blocks.drop([key for key in keys if not self._is_known(key)])
