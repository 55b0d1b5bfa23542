"""What the prefix cache stores, in the tests: the very positions that it should stand for."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.unit.cache.prompts import Parts, is_boundary, parts_of
from vlm_server.cache.prefix import PrefixMatch
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
