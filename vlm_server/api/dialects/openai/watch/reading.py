"""What a model answers about a frame, in the form in which answers are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from vlm_server.api.dialects.openai.questions import Asked, answer_of
from vlm_server.api.dialects.openai.watch.schema import WatchPlan
from vlm_server.protocol import Delta, Finished


class Reading(Struct, frozen=True):
    """An answer, and its probability; with several questions, both by their names.

    finish_reason: of an answer in words.
    """

    answer: Any
    probability: Any
    finish_reason: str | None = None

    def is_surer_than(self, previous: Reading | None, least: float) -> bool:
        """Whether each part of the answer that is new has at least the probability `least`."""
        if not isinstance(self.probability, dict):
            return bool(self.probability >= least)
        old = previous.answer if previous is not None else {}
        return all(
            self.probability[name] >= least
            for name, value in self.answer.items()
            if name not in old or old[name] != value
        )


def read(plan: WatchPlan, deltas: Sequence[Delta], finished: Finished) -> Reading:
    """The reading of a whole answer: its `deltas`, or the decisions of `finished`."""
    if not plan.asked:
        return _in_words(deltas, is_json=plan.is_json)
    answers, probabilities = dict[str, Any](), dict[str, float]()
    decisions = list(finished.decisions)
    for asked in plan.asked:
        of_this = decisions[: asked.num_inputs]
        del decisions[: asked.num_inputs]
        answer = answer_of(asked, of_this)
        answers[asked.name], probabilities[asked.name] = _value(asked, answer)
    return Reading(answers, probabilities)


def _in_words(deltas: Sequence[Delta], *, is_json: bool) -> Reading:
    """The probability is the product of those of the tokens."""
    text = "".join(delta.text for delta in deltas if not delta.is_reasoning).strip()
    logprobs = [entry.token.logprob for delta in deltas for entry in delta.logprobs]
    answer: Any = text
    if is_json:
        try:
            answer = msgspec.json.decode(text)
        except msgspec.DecodeError:  # cut off at `max_tokens`
            answer = text
    reason = deltas[-1].finish_reason if deltas else None
    return Reading(answer, math.exp(min(math.fsum(logprobs), 0.0)), reason)


def _value(asked: Asked, answer: dict[str, Any]) -> tuple[Any, float]:
    """The value of a decision, and its probability."""
    if asked.type == "bool":
        probability = answer["probability"]
        return answer["value"], probability if answer["value"] else 1 - probability
    probabilities = answer["probabilities"]
    if asked.type == "multi_label":
        chosen = set(answer["value"])
        each = (p if label in chosen else 1 - p for label, p in probabilities.items())
        return answer["value"], math.prod(each)
    best = max(probabilities, key=lambda label: probabilities[label])
    return int(best) if asked.type == "score" else best, probabilities[best]
