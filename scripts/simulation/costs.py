"""What a daemon's work takes on one core, as functions of tokens with measured coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one core that does nothing else, and bytes.

    Each tuple holds the coefficients of the method of its name.
    """

    machine: str
    """In words."""
    model: str
    measured: str
    """The date."""
    head_tokens: int
    """With which all prompts of the workload begin."""
    first_text_tokens: int
    """Of a conversation's first prompt, all that is no picture; the head is part of it."""
    turn_text_tokens: int
    """That each later turn adds beside its pictures and the last answer."""
    kv_bytes_per_token: float
    feature_bytes_per_token: float
    request: tuple[float, float, float]
    picture: tuple[float, float]
    encode: tuple[float, float, float]
    prefill: tuple[float, float, float, float]
    join: tuple[float, float]
    merge: float
    """For each token of the batch's rows, when one joins it or leaves it."""
    tail: float
    """Seconds of work that is left of a request when its last token has arrived."""
    decode: tuple[float, float, float]
    slowdown: float = 1.0
    """Of all work while another daemon works on the machine's other core."""
    client_request: float = 0.0
    """What clients and the gateway take of the worker's core for a request, beside it."""
    misfit: dict[str, float] = {}
    """Of each kind of work, the median relative error of the coefficients on what was measured."""

    def request_seconds(self, prompt_tokens: int, num_pictures: int) -> float:
        """HTTP, JSON, hashes, template and tokenizer, and the first event of the answer."""
        base, per_token, per_picture = self.request
        return base + per_token * prompt_tokens + per_picture * num_pictures

    def picture_seconds(self, tokens: int) -> float:
        """A new picture's pixels, decoded and processed."""
        return self.picture[0] + self.picture[1] * tokens

    def encode_seconds(self, tokens: int) -> float:
        base, per_token, per_square = self.encode
        return base + per_token * tokens + per_square * tokens * tokens

    def prefill_seconds(self, new: int, before: int, copied: int = 0) -> float:
        """A chunk of `new` tokens after `before`, of which `copied` come from the cache."""
        base, per_token, per_pair, per_copied = self.prefill
        return base + per_token * new + per_pair * new * (before + new / 2) + per_copied * copied

    def join_seconds(self, prompt_tokens: int) -> float:
        """The prompt is stored and joins the batch, within the step after its first token."""
        return self.join[0] + self.join[1] * prompt_tokens

    def merge_seconds(self, rows: int, context: int) -> float:
        """Several rows, the longest of them of `context` tokens, are copied into a new batch."""
        return self.merge * rows * context if rows > 1 else 0.0

    def decode_seconds(self, rows: int, context: float) -> float:
        """A step of `rows` sequences, padded to the longest, of `context` tokens; 0 without."""
        base, per_row, per_token = self.decode
        return base + per_row * rows + per_token * rows * context if rows else 0.0


def read(file: Path) -> Costs:
    """Raises msgspec.ValidationError if it is no file of costs."""
    return msgspec.json.decode(file.read_bytes(), type=Costs)


def write(costs: Costs, file: Path) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The coefficients, none negative, with the least relative squared errors.

    rows: what each coefficient is multiplied by, for each measurement.
    """
    wanted = np.asarray(seconds, dtype=float)
    scaled = np.asarray(rows, dtype=float) / wanted[:, None]
    free = list(range(scaled.shape[1]))
    found: NDArray[np.float64] = np.zeros(scaled.shape[1])
    while free:
        part, *_ = np.linalg.lstsq(scaled[:, free], np.ones(len(wanted)), rcond=None)
        if (part >= 0).all():
            found[free] = part
            break
        del free[int(np.argmin(part * np.abs(scaled[:, free]).mean(axis=0)))]
    return tuple(float(each) for each in found)


def misfit(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], found: Sequence[float]
) -> float:
    """The median of the relative errors."""
    said = np.asarray(rows, dtype=float) @ np.asarray(found)
    return float(np.median(np.abs(said / np.asarray(seconds) - 1)))
