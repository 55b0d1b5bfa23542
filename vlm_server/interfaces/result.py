"""What one step brought, as the runner tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vlm_server.errors import RequestError
from vlm_server.interfaces.plan import SeqId


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, and the likeliest ones, (token id, log probability) each.

    Probabilities are the model's own, before temperature, penalties and bias.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class DraftCounts(NamedTuple):
    """Draft tokens that a step verified for a sequence: how many there were, and were right."""

    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: tokens that are known by now, and requests that failed alone.

    A request that is among the failures fails with all its sequences. `logprobs` holds an entry for
    each token whose request asked for them. A runner may run one step ahead: a token may belong to
    the step before, and a sequence's token may be missing in the step that launched it; its first
    comes with its prompt's last chunk, or later. A step that verified draft tokens of a sequence
    (`drafts`) may bring it several: those that were right, and one more at the end.
    `prefill_seconds`: what the chunk took; None if the decode step read it. `error` is what
    the model or the device raised, if they did.
    """

    tokens: Mapping[SeqId, Sequence[int]] = field(default_factory=dict)
    failures: Mapping[str, RequestError] = field(default_factory=dict)
    logprobs: Mapping[SeqId, Sequence[TokenLogprobs]] = field(default_factory=dict)
    drafts: Mapping[SeqId, DraftCounts] = field(default_factory=dict)
    prefill_seconds: float | None = 0.0
    error: str | None = None
