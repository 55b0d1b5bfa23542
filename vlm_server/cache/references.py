"""Cache references of one request, which keep entries from eviction while it needs them."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_server.cache.caches import Caches, EncodedImage, Prefix
from vlm_server.cache.disk.tier import DiskRead, DiskReadResult, DiskTier
from vlm_server.cache.lru import Lease
from vlm_server.cache.prompt_key import PromptKey

_NUM_READ_COPIES = 2
"""The number of copies of a file during its read: its bytes, and the arrays copied from them."""


class CacheReferences:
    """References to a prompt's longest cached prefix, and to the features of the media after it.

    Made by the preparer thread, then owned by the request, and released exactly once. Not
    thread-safe.
    """

    def __init__(
        self, caches: Caches, key: PromptKey, salt: str, atomic_prefill_tokens: int
    ) -> None:
        """Match the prefix in memory.

        A prefix of fewer than `atomic_prefill_tokens` is useless. The last token is always
        computed, since no cache has its logits.
        """
        self._caches = caches
        self._key = key
        self._salt = salt
        self._min_length = atomic_prefill_tokens
        self._limit = len(key) - 1
        self._features: dict[int, Lease[EncodedImage]] = {}
        self._is_released = False
        self._prefix = caches.prefixes.match(key, self._limit, salt, self._min_length)

    @property
    def prefix(self) -> Prefix:
        return self._prefix

    @property
    def num_cached_tokens(self) -> int:
        return self._prefix.length

    @property
    def features(self) -> tuple[EncodedImage, ...]:
        """Features of all spans after the prefix, in order."""
        return tuple(self._features[index].value for index in self._spans_after_prefix())

    @property
    def has_first_features(self) -> bool:
        """Whether the features of the first media after the prefix are leased."""
        return next(self._spans_after_prefix(), None) in self._features

    @property
    def num_media_tokens(self) -> int:
        """Tokens of all media after the prefix."""
        spans = self._key.spans
        return sum(spans[index].end - spans[index].start for index in self._spans_after_prefix())

    def missing_spans(self) -> Iterator[int]:
        """The spans after the prefix whose features are not leased, in order."""
        return (index for index in self._spans_after_prefix() if index not in self._features)

    def rematch_prefix(self) -> bool:
        """Look again for a longer prefix in memory; returns whether there is one.

        Features of spans inside it are released.
        """
        longer = self._caches.prefixes.rematch(
            self._prefix, self._key, self._limit, self._salt, self._min_length
        )
        if longer is self._prefix:
            return False
        self._prefix = longer
        uncached_spans = set(self._spans_after_prefix())
        for index in self._features.keys() - uncached_spans:
            self._features.pop(index).release()
        return True

    def cut_prefix(self, length: int) -> None:
        """Use at most `length` tokens of the prefix, for models whose layers can be cut.

        No media span may end after them.
        """
        if length < self._prefix.length:
            self._prefix.cut(length)

    def look_up(self, *, on_disk: bool) -> DiskRead | None:
        """Lease the features in memory; returns the disk read for the rest, if anything is stored.

        Reads no file.
        """
        disk = self._caches.disk if on_disk else DiskTier()
        stored = disk.find_prefix(
            self._key, self._prefix.length, self._limit, self._salt, self._min_length
        )
        length = 0 if stored is None else stored.length
        sizes = dict[int, int]()
        for index in list(self.missing_spans()):
            mm_hash, start = self._key.spans[index].mm_hash, self._key.spans[index].start
            if start < length or self._lease(index, self._caches.features.lease(mm_hash)):
                continue
            if (size_bytes := disk.find_features(mm_hash)) is not None:
                sizes[index] = size_bytes
        if stored is None and not sizes:
            return None
        in_prefix, largest = (stored.size_bytes, stored.largest_bytes) if stored else (0, 0)
        return DiskRead(
            self._key,
            self._salt,
            self._limit,
            length,
            {index: self._key.spans[index].mm_hash for index in sizes},
            in_prefix + sum(sizes.values()),
            _NUM_READ_COPIES * max(largest, *sizes.values(), 0),
        )

    def take_disk_read(self, result: DiskReadResult) -> None:
        """Take over the entries of `result` that are needed, and release the others."""
        self.rematch_prefix()
        for index in list(result.features):
            self.add_features(index, result.features.pop(index))
        result.release()

    def lease_first_features(self) -> None:
        """Lease missing features that are in memory by now, up to the first that are not."""
        for index in list(self.missing_spans()):
            if not self.is_in_memory(index):  # the miss was counted before
                return
            mm_hash = self._key.spans[index].mm_hash
            if not self._lease(index, self._caches.features.lease(mm_hash)):
                return

    def is_in_memory(self, index: int) -> bool:
        """Whether the features of a span are in memory, without leasing them."""
        return self._key.spans[index].mm_hash in self._caches.features

    def _lease(self, index: int, lease: Lease[EncodedImage] | None) -> bool:
        if lease is not None:
            self._features[index] = lease
        return lease is not None

    def add_features(self, index: int, lease: Lease[EncodedImage]) -> None:
        """Take over `lease` on the features of a span; release it if they are not needed."""
        if index in self._features or index not in self._spans_after_prefix():
            lease.release()
        else:
            self._features[index] = lease

    def release(self) -> None:
        """Release all references. Raises RuntimeError the second time."""
        if self._is_released:
            raise RuntimeError("the references of a request are released twice")
        self._is_released = True
        for lease in self._features.values():
            lease.release()
        self._features.clear()
        self._prefix.release()

    def _spans_after_prefix(self) -> Iterator[int]:
        length = self._prefix.length
        return (index for index, span in enumerate(self._key.spans) if span.start >= length)
