"""What agents ask, and when: drawn from a seed, the same for simulated and real daemons."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from scripts.simulation.costs import Costs

PIXELS_PER_TOKEN_SIDE = 28
"""Of the family that is measured: a token stands for 28 by 28 pixels."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Users, each an agent that has one conversation after another.

    Each turn it thinks (acts, in its world), sends its conversation with new pictures of `width` by
    `height` pixels, and reads an answer of `answer_tokens`. Thinking takes `think_seconds` on the
    average, exponentially distributed. No turn begins after `seconds`.
    """

    users: int
    turns: int = 6
    pictures: int = 1
    width: int = 280
    height: int = 224
    answer_tokens: int = 16
    think_seconds: float = 2.0
    seconds: float = 60.0
    seed: int = 0

    @property
    def picture_tokens(self) -> int:
        side = PIXELS_PER_TOKEN_SIDE
        return (self.width // side) * (self.height // side)

    def conversations(self, user: int) -> Iterator[Conversation]:
        """Without end."""
        drawn = random.Random(f"{self.seed} {user}")
        number = 0
        while True:
            thoughts = tuple(
                drawn.expovariate(1 / self.think_seconds) if self.think_seconds else 0.0
                for _ in range(self.turns)
            )
            yield Conversation(f"{self.seed}-{user}-{number}", thoughts)
            number += 1

    def prompt_tokens(self, costs: Costs, turn: int) -> int:
        """Of turn number `turn`, the first being 0."""
        added = costs.turn_text_tokens + self.answer_tokens
        pictures = (turn + 1) * self.pictures * self.picture_tokens
        return costs.first_text_tokens + turn * added + pictures


@dataclass(frozen=True)
class Conversation:
    """key: what the gateway chooses a worker by. think_seconds: before each turn."""

    key: str
    think_seconds: tuple[float, ...]
