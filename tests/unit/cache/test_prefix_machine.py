"""Random prompts that begin alike are stored, matched and evicted, in a cache of any size.

The invariants: what is matched is what was inserted, position for position, and no more than was
asked for; what is leased stays; where nothing must go, nothing is missing or held twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from tests.support.integrity import check_integrity
from tests.support.whole_run import examples
from tests.unit.cache.fakes import (
    SNAPSHOT_BYTES,
    FakeSegment,
    FakeSnapshot,
    FakeSource,
    TakeFailed,
    parts_in,
)
from tests.unit.cache.prompts import (
    Item,
    Parts,
    is_boundary,
    num_common,
    parts_of,
    prompt_of,
)
from vlm_server.cache import prefix
from vlm_server.cache.prefix import PrefixCache, PrefixMatch

UNBOUNDED = 10**6
Match = PrefixMatch[FakeSegment, FakeSnapshot]
Prompt = tuple[Item, ...]

SPANS: list[Item] = [("a", 2, 0), ("a", 2, 1), ("b", 2, 0)]
SPANS_OF_ONE_KEY: list[Item] = [("x", 2, 0), ("x", 3, 0)]
"""Where one is, the other can't be stored."""
ITEMS = st.sampled_from([0, 1, *SPANS, *SPANS_OF_ONE_KEY])
TAILS = st.lists(ITEMS, max_size=3)
SALTS = st.sampled_from(["", "", "other"])
LIMITS = st.integers(0, 14)


@dataclass(frozen=True)
class Known:
    """A prompt of which something is in the tree, and from where it could go on."""

    salt: str
    parts: Parts
    positions: frozenset[int]


@dataclass(eq=False)
class Leased:
    prompt: Prompt
    limit: int
    salt: str
    match: Match

    @property
    def known(self) -> Known:
        """The prefix that the tree can't lose meanwhile."""
        length = self.match.length
        return Known(self.salt, parts_of(prompt_of(self.prompt))[:length], frozenset([length]))


@dataclass
class Oracle:
    """The expected matches, from a list of all inserted prompts."""

    needs_snapshots: bool
    knowns: list[Known] = field(default_factory=list)

    def longest(self, parts: Parts, limit: int, salt: str, others: Iterable[Known] = ()) -> int:
        beginnings = [
            self._common(known, parts, limit)
            for known in (*self.knowns, *others)
            if known.salt == salt
        ]
        return max(beginnings, default=0)

    @property
    def size_bytes(self) -> int:
        """Size of what was inserted, if nothing is held twice."""
        positions, snapshots = set[tuple[str, Parts]](), set[tuple[str, Parts]]()
        for known in self.knowns:
            end = max(known.positions, default=0) if self.needs_snapshots else len(known.parts)
            positions |= {(known.salt, known.parts[: n + 1]) for n in range(end)}
            snapshots |= {(known.salt, known.parts[:n]) for n in known.positions if n}
        return len(positions) + self.needs_snapshots * len(snapshots) * SNAPSHOT_BYTES

    def _common(self, known: Known, parts: Parts, limit: int) -> int:
        common = num_common(known.parts, parts, limit)
        if self.needs_snapshots:
            return max((position for position in known.positions if position <= common), default=0)
        return common


class Prefixes(RuleBasedStateMachine):
    """Never full: all that was inserted must be there."""

    prompts = Bundle("prompts")
    leases = Bundle("leases")
    needs_snapshots = False
    limits = st.just(UNBOUNDED)
    dropped_part = 0.0
    """Of short answers, nothing is dropped where nothing must."""

    def __init__(self) -> None:
        super().__init__()
        self.usually_dropped, prefix._DROPPED_SHARE = prefix._DROPPED_SHARE, self.dropped_part
        self.must = Oracle(self.needs_snapshots)
        """What was inserted without a failure, and that nothing in its way can have stopped."""
        self.may = Oracle(self.needs_snapshots)
        """All that was ever inserted."""
        self.leased = list[Leased]()
        self.hits = self.misses = 0

    @initialize(target=prompts, data=st.data())
    def start(self, data: st.DataObject) -> Prompt:
        self.limit_bytes = data.draw(self.limits)
        self.cache = PrefixCache[FakeSegment, FakeSnapshot](
            "prefix", self.limit_bytes, needs_snapshots=self.needs_snapshots
        )
        return ()

    # ---- what may happen -------------------------------------------------------------

    @rule(
        target=prompts,
        base=prompts,
        cut=st.integers(0, 6),
        tail=TAILS,
        salt=SALTS,
        positions=st.sets(st.integers(0, 14), max_size=4),
        failing=st.none() | st.none() | st.integers(0, 2),
        merges_parts=st.booleans(),
    )
    def insert(
        self,
        base: Prompt,
        cut: int,
        tail: list[Item],
        salt: str,
        positions: set[int],
        failing: int | None,
        merges_parts: bool,
    ) -> Prompt:
        prompt = (*base[:cut], *tail)
        prompt_key = prompt_of(prompt)
        parts = parts_of(prompt_key)
        known = Known(
            salt,
            parts,
            frozenset(n for n in positions if n <= len(parts) and is_boundary(parts, n)),
        )
        source = FakeSource(prompt_key, known.positions, failing)
        failed = False
        try:
            self.cache.insert(prompt_key, source, salt, merges_parts=merges_parts)
        except TakeFailed:
            failed = True
        self.may.knowns.append(known)
        if self.limit_bytes == UNBOUNDED and not failed and not set(prompt) & set(SPANS_OF_ONE_KEY):
            self.must.knowns.append(known)
        return prompt

    @rule(target=leases, base=prompts, cut=st.integers(0, 6), tail=TAILS, limit=LIMITS, salt=SALTS)
    def match(self, base: Prompt, cut: int, tail: list[Item], limit: int, salt: str) -> Leased:
        prompt = (*base[:cut], *tail)
        lease = Leased(prompt, limit, salt, self.cache.match(prompt_of(prompt), limit, salt))
        self.hits += lease.match.length > 0
        self.misses += lease.match.length == 0
        self.check(lease)
        self.leased.append(lease)
        return lease

    @rule(lease=leases)
    def match_again(self, lease: Leased) -> None:
        again = self.cache.match(prompt_of(lease.prompt), lease.limit, lease.salt)
        self.hits += again.length > 0
        self.misses += again.length == 0
        assert again.length >= lease.match.length or lease not in self.leased
        again.release()

    @rule(lease=leases, limit=LIMITS)
    def rematch(self, lease: Leased, limit: int) -> None:
        if lease not in self.leased:
            return
        old = lease.match
        prompt_key = prompt_of(lease.prompt)
        lease.match = self.cache.rematch(old, prompt_key, limit, lease.salt)
        assert lease.match is old or lease.match.length > old.length
        assert lease.match is old or not old.segments
        lease.limit = max(lease.limit, limit)
        self.check(lease, at_least=self.must.longest(parts_of(prompt_key), limit, lease.salt))

    @rule(lease=consumes(leases))
    def release(self, lease: Leased) -> None:
        assert parts_in(lease.match) == lease.known.parts
        lease.match.release()
        with pytest.raises(RuntimeError, match="twice"):
            lease.match.release()
        self.leased.remove(lease)
        assert lease.match.segments == ()

    # ---- what must hold --------------------------------------------------------------

    def check(self, lease: Leased, at_least: int | None = None) -> None:
        match, parts = lease.match, parts_of(prompt_of(lease.prompt))
        assert match.length <= lease.limit
        assert is_boundary(parts, match.length)
        assert parts_in(match) == parts[: match.length]
        if self.needs_snapshots and match.length:
            assert match.snapshot == FakeSnapshot(parts[: match.length])
        else:
            assert match.snapshot is None
        where = parts, lease.limit, lease.salt
        others = [each.known for each in self.leased if each is not lease]
        if at_least is None:
            at_least = self.must.longest(*where, others)
        assert at_least <= match.length <= self.may.longest(*where)

    @invariant()
    def is_whole(self) -> None:
        check_integrity(self.cache)
        reading = self.cache.stats()
        assert reading.size_bytes <= self.limit_bytes
        assert (reading.hits, reading.misses) == (self.hits, self.misses)
        assert self.cache.num_references == len(self.leased)
        assert bool(reading.pinned_bytes) == any(lease.match.length for lease in self.leased)

    @invariant()
    def segments_are_stored_once(self) -> None:
        if self.limit_bytes == UNBOUNDED:
            reading = self.cache.stats()
            assert reading.evictions == 0
            assert self.must.size_bytes <= reading.size_bytes <= self.may.size_bytes

    def teardown(self) -> None:
        prefix._DROPPED_SHARE = self.usually_dropped
        if not hasattr(self, "cache"):
            return
        for lease in self.leased:
            assert parts_in(lease.match) == lease.known.parts
            lease.match.release()
        check_integrity(self.cache)
        assert self.cache.stats().pinned_bytes == self.cache.num_references == 0


class FullPrefixes(Prefixes):
    """Soon full: what is not leased may go."""

    limits = st.integers(0, 16)
    dropped_part = 0.5


class PrefixesWithSnapshots(Prefixes):
    needs_snapshots = True


class FullPrefixesWithSnapshots(FullPrefixes):
    needs_snapshots = True
    limits = st.integers(0, 24)


TestPrefixes = Prefixes.TestCase
TestFullPrefixes = FullPrefixes.TestCase
TestPrefixesWithSnapshots = PrefixesWithSnapshots.TestCase
TestFullPrefixesWithSnapshots = FullPrefixesWithSnapshots.TestCase
BOUNDS = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
TestPrefixes.settings = TestFullPrefixes.settings = BOUNDS
TestPrefixesWithSnapshots.settings = TestFullPrefixesWithSnapshots.settings = BOUNDS
