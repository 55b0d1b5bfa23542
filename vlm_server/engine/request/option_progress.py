"""How far the options of a question are scored; knows lengths, no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_server.interfaces import Branches


class OptionProgress:
    """The options of a question from first to last: those scored, and the part of the next one."""

    def __init__(self, options: Sequence[Sequence[int]]) -> None:
        self.lengths = [len(option) for option in options]
        """Tokens of each option, ascending."""
        self.num_scored = 0
        """The number of whole options that are scored."""
        self.start = 0
        """Tokens of the next option that are scored: of a long one, while others decode."""
        self.num_tokens_left = sum(self.lengths)

    @property
    def num_padded_tokens_left(self) -> int:
        """Tokens of one call with all options left."""
        return (len(self.lengths) - self.num_scored) * self.lengths[-1] - self.start

    def ends_with(self, branches: Sequence[Branches]) -> bool:
        """Whether no option is left after `branches`."""
        if not branches:
            return self.num_scored == len(self.lengths)
        last = branches[-1]
        return last.end == len(self.lengths) and last.width == self.lengths[-1]

    def record(self, branches: Sequence[Branches]) -> None:
        """Record that `branches` are scored, which follow what was scored before."""
        for each in branches:
            lengths = self.lengths[each.first : each.end]
            self.num_tokens_left -= sum(min(length, each.width) - each.start for length in lengths)
            is_part = each.width < lengths[-1]
            self.num_scored = each.first if is_part else each.end
            self.start = each.width if is_part else 0
