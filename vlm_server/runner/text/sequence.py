"""A sequence of the decode batch: where it stands, and who must be told what it draws."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlm_server.interfaces import PreparedPrompt, SeqId
from vlm_server.runner.sampling.sampler import SequenceSampler
from vlm_server.runner.text.speculation.drafts import Drafter


@dataclass(slots=True)
class DecodingSequence:
    """`position` is that of the next token, before the family's rope delta.

    `token_ids` are those of the answer that the cache holds. `is_reported` and `is_known` are said
    of the token that was drawn last: the second, whether drafter and grammar were told of it.
    """

    id: SeqId
    sampler: SequenceSampler
    prompt: PreparedPrompt
    position: int
    drafter: Drafter | None
    token_ids: list[int] = field(default_factory=list)
    is_reported: bool = True
    is_known: bool = False

    @property
    def num_useful_drafts(self) -> int | None:
        """How many more tokens than one the answer may have; None if nobody has bounded it."""
        most = self.sampler.params.max_tokens
        return None if most is None else max(most - len(self.token_ids) - 2, 0)

    def tell(self, token_ids: list[int]) -> None:
        """Tell drafter and grammar what was drawn."""
        self.is_known = True
        self.sampler.follow(token_ids)
        if self.drafter is not None:
            for token_id in token_ids:
                self.drafter.append(token_id)
