"""Features and KV on disk, beneath the caches in memory. Knows records and threads; decides little.

The inference thread only notes what is new; one thread of its own writes it, and threads that
prepare requests read. What can't be written or read is missed, and costs no request.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import mlx.core as mx

from vlm_server.cache.block_hash import BlockWalk, KVBlock, KVBlockIndex, block_after
from vlm_server.cache.caches import DiskTier, EncodedImage, NoDisk
from vlm_server.cache.disk import DiskStore, default_folder
from vlm_server.cache.ledger import Cache
from vlm_server.cache.prefix import PrefixCache, Source
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.runner.device.device import Device
from vlm_server.runner.kv.records import (
    UNREADABLE,
    PrefixHeader,
    Record,
    StoredPrefix,
    features_record,
    prefix_record,
    read_header,
)
from vlm_server.runner.kv.segments import KVSegment, LayerStates
from vlm_server.runner.model.fingerprint import state_fingerprint
from vlm_server.runner.vision.encoder import ImageFeatures
from vlm_server.settings import Cache as CacheSettings

logger = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 256 << 20
"""Of arrays that wait to be written: what is more is not kept, or the next time."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A record to write, and the keys of those that it is of no use without, the first first."""

    key: str
    record: Record
    behind: tuple[str, ...] = ()


class DiskCache:
    """The `DiskTier` of one model."""

    def __init__(
        self,
        store: DiskStore,
        fingerprint: str,
        prefix_bytes: int,
        *,
        needs_snapshots: bool,
    ) -> None:
        """`prefix_bytes`: the most that is read of a prompt. See `PrefixCache.needs_snapshots`."""
        self._store = store
        self._fingerprint = fingerprint
        self._prefix_bytes = prefix_bytes
        self._needs_snapshots = needs_snapshots
        self._lock = threading.Lock()
        self._blocks = KVBlockIndex(whole=needs_snapshots)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._queued: dict[str, int] = {}
        """Sizes of what waits to be written, by key."""
        self._read_headers()
        self._writer = threading.Thread(target=self._write_all, name="disk cache", daemon=True)
        self._writer.start()

    @property
    def caches(self) -> tuple[Cache, ...]:
        return (self._store,)

    def close(self, seconds: float) -> None:
        self._queue.put(None)
        self._writer.join(seconds)
        self._store.close()

    def store_features(self, key: str, features: EncodedImage) -> None:
        assert isinstance(features, ImageFeatures)
        stored = _features_key(key)
        with self._lock:
            is_known = self._is_known(stored)
        if not is_known and features.size_bytes <= self._room:
            self._add(_Job(stored, features_record(self._fingerprint, key, features)))

    def lease_features(self, key: str) -> ImageFeatures | None:
        stored = _features_key(key)
        record = self._load(stored, key)
        if record is None:
            return None
        self._store.touch([stored])
        return record.features

    def store_prefix(
        self, elements: PromptKey, source: Source[KVSegment, LayerStates], salt: str
    ) -> None:
        with self._lock:
            walk = self._blocks.walk(elements, len(elements), salt, self._is_known)
        start, behind = walk.length, walk.keys
        for end in self._ends(elements, source, start):
            snapshot = source.snapshots[end] if self._needs_snapshots else None
            size_bytes = source.size_bytes(start, end) + (snapshot.size_bytes if snapshot else 0)
            if end <= start or size_bytes > self._room:
                return
            block = block_after(walk.chain, elements.part(start, end))
            segment = source.take(start, end)
            with self._lock:
                self._blocks.add(block)
            record = prefix_record(self._fingerprint, block, segment, snapshot)
            self._add(_Job(block.key, record, behind))
            start, behind = end, (*behind, block.key)

    def match_prefix(
        self, elements: PromptKey, known: int, limit: int, salt: str, least: int
    ) -> StoredPrefix | None:
        with self._lock:
            walk = self._blocks.walk(elements, limit, salt, self._store.__contains__)
        if walk.length <= known or walk.length < least:
            self._store.count_miss()
            return None
        found = self._load_behind(known, walk)
        self._store.touch(reversed(walk.keys))
        return found

    # ---- reading -------------------------------------------------------------------

    def _load_behind(self, known: int, walk: BlockWalk) -> StoredPrefix | None:
        """What can be read of the blocks that reach further than `known` elements."""
        start = at = size_bytes = 0
        segments, snapshot = list[tuple[KVSegment, int]](), None
        for block, count in walk.blocks:
            at += count
            if at <= known:
                start = at
                continue
            record = self._load(block.key, block)
            if record is None:
                break
            size_bytes += record.size_bytes
            if size_bytes > self._prefix_bytes:
                break
            segments.append((record.segment, count))
            snapshot = record.snapshot
        return StoredPrefix(start, segments, snapshot) if segments else None

    def _load(self, key: str, subject: str | KVBlock) -> Record | None:
        """What is stored of `subject`; None if it is not here, or is of no use and so deleted."""
        data = self._store.get(key)
        if data is not None:
            record = self._understood(data)
            if record and record.header.is_of(self._fingerprint, subject):
                return record
            self._store.discard(key)
        self._drop([key])
        return None

    def _understood(self, data: bytes) -> Record | None:
        try:
            return Record.read(data)
        except UNREADABLE:
            logger.debug("a cache file can't be understood", exc_info=True)
            return None

    def _read_headers(self) -> None:
        """Find out which blocks of prompts there are."""
        for key, path in self._store.paths.items():
            if not key.startswith("prefix-"):
                continue
            try:
                header = read_header(path)
            except UNREADABLE:
                header = None
            if isinstance(header, PrefixHeader) and header.is_sound(self._fingerprint, key):
                self._blocks.add(header.block)
            else:
                self._store.discard(key)

    # ---- writing -------------------------------------------------------------------

    @property
    def _room(self) -> int:
        with self._lock:
            return _MAX_QUEUED_BYTES - sum(self._queued.values())

    def _is_known(self, key: str) -> bool:
        """With the lock: whether it is here or will be."""
        return key in self._queued or key in self._store

    def _ends(
        self, elements: PromptKey, source: Source[KVSegment, LayerStates], start: int
    ) -> list[int]:
        """Where blocks shall end that begin with the one at `start`."""
        if self._needs_snapshots:
            return sorted(place for place in source.snapshots if place > start)
        most = self._room // source.size_bytes(0, 1)
        return [elements.floor(min(start + most, len(elements)))]

    def _add(self, job: _Job) -> None:
        with self._lock:
            self._queued[job.key] = job.record.size_bytes
        self._queue.put(job)

    def _write_all(self) -> None:
        """On the writer's thread, until it is told to end."""
        while (job := self._queue.get()) is not None:
            try:
                is_written = self._write(job)
            except Exception as error:  # noqa: BLE001 - requests go on without
                logger.warning("a cache file can't be written: %s", error)
                is_written = False
            with self._lock:
                del self._queued[job.key]
            if not is_written:
                self._drop([job.key])
        mx.clear_streams()

    def _write(self, job: _Job) -> bool:
        """Whether it found room. Blocks are used before those after them: the ends go first."""
        if not all(key in self._store for key in job.behind):
            return False
        gone = self._store.make_room(job.record.size_bytes, keep=job.behind)
        if gone is None:
            return False
        self._drop(gone)
        if job.key in self._store:  # though nothing was found there
            self._store.discard(job.key)
        self._store.put(job.key, job.record.write)
        self._store.touch((job.key, *reversed(job.behind)))
        return True

    def _drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._blocks.drop(keys)


def open_disk_cache(
    settings: CacheSettings,
    checkpoint: str,
    prefixes: PrefixCache[KVSegment, LayerStates],
    device: Device,
) -> DiskTier:
    """What `settings` say; nothing, with a warning, if the folder is no good or another has it.

    `checkpoint` is its fingerprint.
    """
    if not settings.disk_bytes:
        return NoDisk()
    folder = Path(settings.disk_path).expanduser() if settings.disk_path else default_folder()
    fingerprint = state_fingerprint(checkpoint, device.name)
    try:
        store = DiskStore("disk", folder, fingerprint, settings.disk_bytes)
    except OSError as error:
        logger.warning("nothing is kept on disk: %s can't be used: %s", folder, error.strerror)
        return NoDisk()
    return DiskCache(
        store, fingerprint, prefixes.limit_bytes, needs_snapshots=prefixes.needs_snapshots
    )


def _features_key(key: str) -> str:
    return f"features-{hashlib.sha256(key.encode()).hexdigest()}"
