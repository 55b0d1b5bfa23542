"""What the prefix cache stores, in the tests: the very positions that it should stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.unit.cache.prompts import Parts, is_boundary, parts_of
from vlm_server.cache.disk.tier import DiskTier, EncodedImage, StoredPrefixSizes
from vlm_server.cache.lru import InspectableCache
from vlm_server.cache.prefix import PrefixMatch, Source
from vlm_server.cache.prompt_key import PromptKey

SNAPSHOT_BYTES = 3
"""A position has 1."""


class TakeFailed(Exception):
    pass


@dataclass(frozen=True)
class FakeSegment:
    parts: Parts

    @property
    def size_bytes(self) -> int:
        return len(self.parts)

    def split(self, at: int) -> tuple[FakeSegment, FakeSegment]:
        assert 0 < at < len(self.parts)
        assert is_boundary(self.parts, at)
        return FakeSegment(self.parts[:at]), FakeSegment(self.parts[at:])


@dataclass(frozen=True)
class FakeSnapshot:
    parts: Parts

    @property
    def size_bytes(self) -> int:
        return SNAPSHOT_BYTES


@dataclass
class FakeSource:
    """Has snapshots after `positions`; fails in the take number `failing`, from 0 on."""

    prompt_key: PromptKey
    positions: frozenset[int] = frozenset()
    failing: int | None = None
    takes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def snapshots(self) -> dict[int, FakeSnapshot]:
        parts = parts_of(self.prompt_key)
        return {position: FakeSnapshot(parts[:position]) for position in self.positions}

    def size_bytes(self, start: int, end: int) -> int:
        return end - start

    def take(self, start: int, end: int) -> FakeSegment:
        if self.failing == len(self.takes):
            raise TakeFailed
        self.takes.append((start, end))
        parts = parts_of(self.prompt_key)
        assert 0 <= start < end <= len(parts)
        assert is_boundary(parts, start)
        assert is_boundary(parts, end)
        return FakeSegment(parts[start:end])


def parts_in(match: PrefixMatch[FakeSegment, FakeSnapshot]) -> Parts:
    """The positions that the match's segments stand for."""
    return tuple(part for segment, count in match.segments for part in segment.parts[:count])


class LoadedSource(FakeSource):
    """A source read from disk, with every part of its prompt."""

    @property
    def length(self) -> int:
        return len(self.prompt_key)


@dataclass
class FakeDisk(DiskTier):
    """Has `features` and `source`; says what it was asked."""

    features: dict[str, EncodedImage] = field(default_factory=dict)
    source: LoadedSource | None = None
    caches: tuple[InspectableCache, ...] = ()
    calls: list[str] = field(default_factory=list)

    def store_features(self, key: str, features: EncodedImage) -> None:
        self.calls.append(f"store {key}")

    def find_features(self, key: str) -> int | None:
        self.calls.append(f"find {key}")
        return self.features[key].size_bytes if key in self.features else None

    def read_features(self, key: str) -> EncodedImage | None:
        self.calls.append(f"load {key}")
        return self.features.get(key)

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        self.calls.append(f"store {len(prompt)}")

    def find_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str, min_length: int
    ) -> StoredPrefixSizes | None:
        self.calls.append(f"find {known} to {limit}")
        length = self.source.length if self.source else 0
        return StoredPrefixSizes(length, length, length) if length > known else None

    def read_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str
    ) -> Iterator[LoadedSource]:
        self.calls.append(f"load {known} to {limit}")
        return iter([self.source] if self.source else [])

    def close(self, seconds: float) -> None:
        self.calls.append("close")
