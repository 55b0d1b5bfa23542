"""Questions of `/v1/decisions`: what the model is asked, and the answer that its choice means.

The text of a question does not depend on the order of its options: they are listed sorted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from vlm_server.api.dialects.fields import prepare
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Decision

Kind = Literal["choice", "bool", "score", "multi_label", "ranking"]
TYPE_RULE = "must be 'choice', 'bool', 'score', 'multi_label' or 'ranking'"
_MIN_CRITERIA: dict[Kind, int] = {"choice": 2, "score": 2, "multi_label": 1, "ranking": 2}
_YES, _NO = ("yes", "Yes"), ("no", "No")
_LABEL = "{label}"


class Question(Struct, forbid_unknown_fields=True, kw_only=True):
    """A question, as mlx-vlm has it; `criteria` are labels, or map labels to descriptions.

    Without `list_options` the model is asked the instructions as they are.
    """

    instructions: Annotated[str, Meta(min_length=1)]
    type: Kind = "choice"
    criteria: list[str] | dict[str, str | None] | None = None
    threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    list_options: bool | None = None


prepare(Question)


class Asked(Struct, frozen=True):
    """A question as its answer needs it: its labels in the request's order."""

    name: str
    type: Kind
    labels: tuple[str, ...]
    threshold: float

    @property
    def num_inputs(self) -> int:
        """The inputs of the engine's request that it takes."""
        return len(self.labels) if self.type == "multi_label" else 1


class Input(Struct, frozen=True):
    """An input of the engine's request: the text of a question, and the options of its answer.

    `num_spellings`: see `PoolingInput`.
    """

    text: str
    options: tuple[str, ...]
    num_spellings: int = 1


def read_question(name: str, question: Question, param: str) -> tuple[Asked, tuple[Input, ...]]:
    """A question, and what the model is asked. Raises InvalidRequest."""
    labels = _labels(question, param)
    threshold = 0.5 if question.threshold is None else question.threshold
    if (
        question.type == "multi_label"
        and question.list_options is False
        and _LABEL not in question.instructions
    ):
        raise InvalidRequest(
            f"`{param}.instructions` must name the label as `{_LABEL}` if it is not listed.",
            f"{param}.instructions",
        )
    asked = Asked(name, question.type, labels, threshold)
    return asked, tuple(_inputs(question, labels))


def _labels(question: Question, param: str) -> tuple[str, ...]:
    kind, criteria, param = question.type, question.criteria, f"{param}.criteria"
    if kind == "bool":
        if criteria is not None and (
            isinstance(criteria, list) or not criteria.keys() <= {"true", "false"}
        ):
            raise InvalidRequest(f"`{param}` may describe `true` and `false` alone.", param)
        return ("true", "false")
    minimum = _MIN_CRITERIA[kind]
    if criteria is None or len(criteria) < minimum:
        raise InvalidRequest(f"`{param}` must have at least {minimum}.", param)
    if kind == "score":
        if not isinstance(criteria, list):
            raise InvalidRequest(f"`{param}` must be a list, from the lowest level up.", param)
        return tuple(str(level) for level in range(len(criteria)))
    if "" in criteria:
        raise InvalidRequest(f"`{param}` has an empty label.", param)
    if len(set(criteria)) < len(criteria):
        raise InvalidRequest(f"`{param}` has a label twice.", param)
    return tuple(criteria)


def _inputs(question: Question, labels: Sequence[str]) -> Iterator[Input]:
    options, num_spellings = tuple(labels), 1
    if question.type in ("bool", "multi_label"):
        options, num_spellings = (*_YES, *_NO), len(_YES)
    for label in labels if question.type == "multi_label" else ("",):
        if question.list_options is False:
            text = question.instructions.replace(_LABEL, label)
            yield Input(text, options, num_spellings)
        else:
            lines = [question.instructions, *_explained(question, label)]
            yield Input("\n".join(lines), options, num_spellings)


def _explained(question: Question, label: str) -> Iterator[str]:
    """The lines after the instructions: the options and the form of the answer."""
    criteria = question.criteria or ()
    described = criteria if isinstance(criteria, Mapping) else {}
    match question.type:
        case "bool":
            meanings = (("true", "Yes"), ("false", "No"))
            yield from (f"{word}: {described[key]}" for key, word in meanings if key in described)
            yield from ("", "Reply with yes or no alone.")
        case "score":
            levels = (f"{i}: {text}" for i, text in enumerate(criteria))
            yield from ("", *levels, "", "Reply with the number alone.")
        case "multi_label":
            applies = f"Does this apply: {_described(label, described)}"
            yield from ("", applies, "", "Reply with yes or no alone.")
        case _:
            lines = (f"- {_described(each, described)}" for each in sorted(criteria))
            yield from ("", "Options:", *lines, "", "Reply with one option alone.")


def _described(label: str, descriptions: Mapping[str, str | None]) -> str:
    description = descriptions.get(label)
    return f"{label}: {description}" if description else label


# ---- answers -----------------------------------------------------------------------------


def answer_of(asked: Asked, decisions: Sequence[Decision]) -> dict[str, Any]:
    """The answer to a question as JSON; `decisions`: of each of its inputs."""
    if asked.type == "multi_label":
        return _labels_that_apply(asked, decisions)
    (decision,) = decisions
    if asked.type == "bool":
        logprobs, says_yes = _yes_or_no(decision)
        probability = _normalized(logprobs)[0]
        return {
            "type": "bool",
            "value": probability >= asked.threshold,
            "probability": probability,
            "logprobs": dict(zip(asked.labels, logprobs, strict=True)),
            "greedy": says_yes,
        }
    probabilities = _normalized(decision.logprobs)
    best = max(range(len(probabilities)), key=lambda i: (probabilities[i], -i))
    greedy: Any = asked.labels[decision.greedy]
    value: Any = asked.labels[best]
    if asked.type == "score":
        value, greedy = sum(i * p for i, p in enumerate(probabilities)), decision.greedy
    if asked.type == "ranking":
        order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
        value = [asked.labels[i] for i in order]
    return {
        "type": asked.type,
        "value": value,
        "probabilities": dict(zip(asked.labels, probabilities, strict=True)),
        "logprobs": dict(zip(asked.labels, decision.logprobs, strict=True)),
        "greedy": greedy,
        "metadata": {"confidence": probabilities[best]},
    }


def _labels_that_apply(asked: Asked, decisions: Sequence[Decision]) -> dict[str, Any]:
    answers = [_yes_or_no(decision) for decision in decisions]
    probabilities = [_normalized(logprobs)[0] for logprobs, _ in answers]
    by_label = dict(zip(asked.labels, probabilities, strict=True))
    greedy = zip(asked.labels, answers, strict=True)
    return {
        "type": "multi_label",
        "value": [label for label, p in by_label.items() if p >= asked.threshold],
        "probabilities": by_label,
        "greedy": [label for label, (_, says_yes) in greedy if says_yes],
    }


def _yes_or_no(decision: Decision) -> tuple[tuple[float, float], bool]:
    """Log probabilities of yes and of no, in any spelling; and whether greedy sampling says yes."""
    yes, no = decision.logprobs[: len(_YES)], decision.logprobs[len(_YES) :]
    logprobs = min(_log_sum(yes), 0.0), min(_log_sum(no), 0.0)  # rounding may exceed 0
    return logprobs, decision.greedy < len(_YES)


def _normalized(logprobs: Sequence[float]) -> list[float]:
    """Probabilities that add up to one."""
    total = _log_sum(logprobs)
    return [math.exp(each - total) for each in logprobs]


def _log_sum(logprobs: Sequence[float]) -> float:
    highest = max(logprobs)
    return highest + math.log(math.fsum(math.exp(each - highest) for each in logprobs))
