"""A drafter for tests that knows the answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Oracle:
    """Drafts that are known to be right, but for some that are made wrong on purpose."""

    def __init__(self, answers: dict[tuple[int, ...], list[list[int]]], rate: float) -> None:
        self.answers, self.rate = answers, rate
        self.random = random.Random(1)

    def __call__(self, prompt_ids: NDArray[np.int32], prediction: Sequence[int]) -> OracleDrafter:
        return OracleDrafter(self, self.answers[tuple(prompt_ids.tolist())])


class OracleDrafter:
    probability = 1.0

    def __init__(self, oracle: Oracle, answers: list[list[int]]) -> None:
        self.oracle, self.answers = oracle, answers
        self.told: list[int] = []

    def append(self, token_id: int) -> None:
        self.told.append(token_id)

    def probabilities(self, count: int) -> list[float]:
        return [1.0] * count

    def guess(self, count: int) -> list[int]:
        count = self.oracle.random.randint(0, count)
        start = len(self.told)
        fitting = (a for a in self.answers if a[:start] == self.told)
        right = next(fitting, [])[start : start + count]
        wrong = self.oracle.random.random
        return [(t + 1) % 50 if wrong() < self.oracle.rate else t for t in right]
