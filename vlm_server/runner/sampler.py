"""Draws the next token of each row on the device. Knows logits and sampling parameters.

A row's draw depends on its own seed, step and logits alone, so that it is the same whatever
rows run beside it. Greedy rows cost an argmax.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import mlx.core as mx

from vlm_server.protocol import SamplingParams

_LEAST_TEMPERATURE = 1e-5
"""Colder is the same as greedy, and would overflow."""
_LEAST_TOP_P = 1e-9
_MASK_64 = (1 << 64) - 1


@dataclass(slots=True)
class RowSampler:
    """One row's way to draw; `step` counts its draws."""

    temperature: float
    top_p: float
    seed: int
    step: int = 0

    @classmethod
    def of(cls, sampling: SamplingParams) -> RowSampler:
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return cls(
            temperature=0.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            seed=seed,
        )

    def draw(self, logits: mx.array) -> mx.array:
        """A token id, (), from one row's `logits`, (vocabulary,) float32."""
        logprobs = (logits - logits.max()) / max(self.temperature, _LEAST_TEMPERATURE)
        if self.top_p < 1.0:
            logprobs = _keep_top_p(logprobs, max(self.top_p, _LEAST_TOP_P))
        return mx.random.categorical(logprobs, key=mx.random.key(_mix(self.seed, self.step)))


def sample(logits: mx.array, rows: list[RowSampler]) -> mx.array:
    """Token ids, (rows,), from `logits`, (rows, vocabulary); advances every row's step."""
    tokens = mx.argmax(logits, axis=-1)
    drawn = [i for i, row in enumerate(rows) if row.temperature > 0]
    if drawn:
        scores = logits.astype(mx.float32)
        tokens[mx.array(drawn)] = mx.stack([rows[i].draw(scores[i]) for i in drawn])
    for row in rows:
        row.step += 1
    return tokens


def _mix(seed: int, step: int) -> int:
    """64 well-spread bits for one draw (the finalizer of SplitMix64, Steele et al. 2014)."""
    bits = (seed + step * 0x9E3779B97F4A7C15) & _MASK_64
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK_64
    return bits ^ bits >> 31


def _keep_top_p(logits: mx.array, top_p: float) -> mx.array:
    """`logits` with all but the smallest set of mass `top_p` at minus infinity.

    Nucleus sampling (Holtzman et al. 2020): a token stays if the mass above it is below
    `top_p`, so at least the likeliest one does.
    """
    order = mx.argsort(-logits)
    probs = mx.softmax(logits[order])
    is_kept = mx.cumsum(probs) - probs < top_p
    kept = mx.where(is_kept, logits[order], -mx.inf)
    return mx.put_along_axis(logits, order, kept, axis=-1)
