"""Reasoning comes before the grammar of an answer, and ends within its budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.prompt.grammar.test_grammars import byte_host
from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher
from vlm_server.interfaces.model_spec import ReasoningFormat
from vlm_server.prompt.grammar.reasoning_grammar import ReasoningGrammar, with_reasoning
from vlm_server.prompt.grammar.reasoning_marks import ReasoningMarks
from vlm_server.protocol import SamplingParams, Submit, TemplateOptions

END = 256
TEMPLATE = r"{{ '<think>\n' + thought + '\n</think>\n\n' + content }}"
SPELLED = ReasoningFormat("<think>", "</think>")


def new_marks(*tokens: str, special: bool = True, template: str = "") -> ReasoningMarks:
    """Reasoning marks of a model with one token per byte, and with `tokens`."""
    host = byte_host()
    host.backend.add_special_tokens([*tokens]) if special else host.backend.add_tokens([*tokens])
    host.vocabulary_size, host.chat_template = host.backend.get_vocab_size(), template
    return ReasoningMarks(host, SPELLED)


@dataclass
class FakeGrammar:
    """A grammar whose answers are `text` and an end token; records the tokens of each matcher."""

    size: int
    text: str = "["
    advanced: list[list[int]] = field(default_factory=list)
    late_error: bool = False
    num_closed: int = 0

    def begin(self, count: int) -> list[AnswerMatcher]:
        self.advanced += [[] for _ in range(count)]
        return [FakeMatcher(self, advanced) for advanced in self.advanced[-count:]]


@dataclass
class FakeMatcher:
    grammar: FakeGrammar
    advanced: list[int]
    drafts: Sequence[int] = ()
    fault: RequestError | None = None
    can_look_ahead = True
    forced: tuple[int, ...] = ()

    def advance(self, token_ids: Sequence[int]) -> None:
        self.advanced.extend(token_ids)

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        self.drafts = token_ids

    def draft_masks(self) -> Sequence[NDArray[np.bool_]]:
        return [self.allowed()] * len(self.drafts)

    def wait(self, seconds: float) -> bool:
        return not self.grammar.late_error

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.grammar.size, dtype=np.bool_)
        rest = self.grammar.text[len(self.advanced) :]
        mask[id_of(rest[0]) if rest else END] = True
        return mask

    def lower_priority(self) -> None:
        pass

    def close(self) -> None:
        self.grammar.num_closed += 1


def id_of(text: str) -> int:
    found = byte_host().backend.token_to_id(text)
    assert found is not None
    return int(found)


def ids(marks: ReasoningMarks, text: str) -> list[int]:
    return list(marks._backend.encode(text, add_special_tokens=False).ids)


def begin(
    marks: ReasoningMarks,
    inner: FakeGrammar | None = None,
    budget: int | None = None,
    starts: bool = True,
    may_begin: bool = True,
) -> AnswerMatcher:
    grammar = ReasoningGrammar(marks, inner, budget, starts=starts, may_begin=may_begin)
    (matcher,) = grammar.begin(1)
    return matcher


def write(matcher: AnswerMatcher, token_ids: list[int]) -> None:
    """Sample `token_ids`, which must be allowed."""
    for token_id in token_ids:
        assert matcher.wait(0.0)
        assert matcher.allowed()[token_id]
        matcher.advance([token_id])


def forced(matcher: AnswerMatcher) -> list[int]:
    """Sample tokens as long as only one is allowed; returns them."""
    sampled: list[int] = []
    while matcher.wait(0.0) and matcher.allowed().sum() == 1 and sampled[-1:] != [END]:
        sampled.append(int(matcher.allowed().argmax()))
        matcher.advance([sampled[-1]])
    return sampled


@pytest.fixture(params=["spelled", "control", "added"])
def marks(request: pytest.FixtureRequest) -> ReasoningMarks:
    tokens = () if request.param == "spelled" else ("<think>", "</think>")
    return new_marks(*tokens, special=request.param == "control", template=TEMPLATE)


# ---- grammars after reasoning --------------------------------------------------------


def test_grammar_begins_after_reasoning_ends(marks: ReasoningMarks):
    inner = FakeGrammar(marks.everything.size)
    matcher = begin(marks, inner)
    inner.late_error = True  # it is not consulted before the end mark
    write(matcher, ids(marks, "Hm </thin [5] <think>"))
    assert not matcher.allowed()[END]
    write(matcher, ids(marks, "</think>"))
    inner.late_error = False
    assert forced(matcher) == [*ids(marks, "\n\n"), id_of("["), END]
    assert inner.advanced == [[id_of("["), END]]


def test_reasoning_grammar_waits_only_after_reasoning(marks: ReasoningMarks):
    inner = FakeGrammar(marks.everything.size, late_error=True)
    matcher = begin(marks, inner, budget=0)
    for token_id in ids(marks, "</think>\n\n"):
        assert matcher.wait(0.0)
        matcher.advance([token_id])
    assert not matcher.wait(0.0)


def test_answer_may_start_with_reasoning_or_grammar(marks: ReasoningMarks):
    inner = FakeGrammar(marks.everything.size)
    matcher = begin(marks, inner, starts=False)
    first = marks.start_ids[0]
    assert set(np.flatnonzero(matcher.allowed())) == {id_of("["), first}
    write(matcher, [id_of("[")])
    assert inner.advanced == [[id_of("[")]]
    assert forced(matcher) == [END]
    matcher = begin(marks, inner, starts=False)
    write(matcher, [first])
    assert forced(matcher) == marks.start_ids[1:]
    write(matcher, ids(marks, "Hm</think>"))
    assert forced(matcher) == [*ids(marks, "\n\n"), id_of("["), END]


@pytest.mark.parametrize("budget", [None, 2])
def test_reasoning_may_begin_as_grammar_does(budget: int | None):
    """As with a channel's header: what both share is written again behind reasoning."""
    marks = new_marks()
    inner = FakeGrammar(marks.everything.size, "<th[")
    matcher = begin(marks, inner, budget, starts=False)
    assert forced(matcher) == ids(marks, "<th")
    assert set(np.flatnonzero(matcher.allowed())) == {id_of("["), id_of("i")}
    inner.late_error = True
    assert not matcher.wait(0.0)
    inner.late_error = False
    write(matcher, ids(marks, "ink>Hm"))
    write(matcher, ids(marks, "</think>"))
    assert forced(matcher) == [*ids(marks, "<th["), END]
    assert inner.advanced == [[*ids(marks, "<th["), END]]
    matcher = begin(marks, inner, budget, starts=False)
    assert forced(matcher) == ids(marks, "<th")
    write(matcher, [id_of("[")])
    assert forced(matcher) == [END]


def test_reasoning_may_be_disallowed_before_grammar(marks: ReasoningMarks):
    matcher = begin(marks, FakeGrammar(marks.everything.size), starts=False, may_begin=False)
    assert forced(matcher) == [id_of("["), END]


def test_end_mark_tokens_never_swallow_answer_text():
    """A token that ends reasoning and goes on would hide its rest from the grammar."""
    marks = new_marks("></", ">[", ">\n", "nk>{", "k>", "</think>", special=False)
    inner = FakeGrammar(marks.everything.size)
    pieces = {text: marks._backend.token_to_id(text) for text in ("></", ">[", ">\n", "nk>{", "k>")}
    matcher = begin(marks, inner)
    write(matcher, [pieces[">["], *map(id_of, "</thi")])
    allowed = matcher.allowed()
    assert not allowed[pieces["nk>{"]]
    assert not allowed[END]
    assert allowed[pieces[">["]]
    write(matcher, [id_of("n")])
    assert matcher.allowed()[pieces["k>"]]
    write(matcher, [id_of("k")])
    allowed = matcher.allowed()
    assert not allowed[pieces[">["]]
    assert not allowed[pieces["></"]]
    write(matcher, [pieces[">\n"]])
    assert forced(matcher) == [id_of("["), END]


def test_reasoning_matchers_are_independent_and_closed(marks: ReasoningMarks):
    inner = FakeGrammar(marks.everything.size)
    first, second = ReasoningGrammar(marks, inner, 2, starts=True, may_begin=True).begin(2)
    write(first, ids(marks, "ab"))
    assert forced(first) == [*marks.closing_ids, id_of("["), END]
    write(second, ids(marks, "a"))
    assert second.allowed().sum() > 100
    assert inner.advanced == [[id_of("["), END], []]
    first.close()
    second.close()
    assert inner.num_closed == 2


# ---- budgets -------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_reasoning_budget_forces_end_mark(marks: ReasoningMarks, budget: int):
    matcher = begin(marks, budget=budget)
    write(matcher, ids(marks, "abcdefg")[:budget])
    assert forced(matcher) == ids(marks, "</think>\n\n")
    write(matcher, [*ids(marks, "free again"), END])


def test_reasoning_within_budget_ends_freely(marks: ReasoningMarks):
    matcher = begin(marks, budget=30)
    write(matcher, ids(marks, "Hm</think>Text that is longer than the budget of thoughts."))
    assert matcher.allowed() is marks.everything


def test_end_token_is_allowed_inside_reasoning_without_grammar(marks: ReasoningMarks):
    matcher = begin(marks, budget=30)
    write(matcher, [*ids(marks, "Hm"), END])


def test_reasoning_budget_covers_later_reasoning_of_answer(marks: ReasoningMarks):
    matcher = begin(marks, budget=3, starts=False)
    write(matcher, ids(marks, "\n<think>abc"))
    assert forced(matcher) == marks.closing_ids
    write(matcher, ids(marks, "<think>"))
    assert forced(matcher) == marks.closing_ids, "another one is out of budget at once"
    write(matcher, ids(marks, "Now I speak of <think> and of more than three letters."))


def test_reasoning_masks_are_shared_read_only_arrays(marks: ReasoningMarks):
    free, held = begin(marks, budget=100), begin(marks, FakeGrammar(marks.everything.size), 100)
    masks = []
    for token_id in ids(marks, "a thought"):
        masks += [free.allowed(), held.allowed()]
        free.advance([token_id])
        held.advance([token_id])
    assert len({id(mask) for mask in masks}) == 2
    assert not any(mask.flags.writeable for mask in masks)


@pytest.mark.parametrize(
    ("template", "blanks"),
    [
        ("", ""),
        (TEMPLATE, "\n\n"),
        ("{{ '</think>\n' }}", "\n"),
        (r"{% if '</think>' in content %}</think>\n{% endif %}", "\n"),
    ],
)
def test_blanks_after_reasoning_follow_chat_template(template: str, blanks: str):
    marks = new_marks("</think>", template=template)
    assert marks.closing_ids == [*ids(marks, "</think>"), *ids(marks, blanks)]


# ---- requests with a reasoning grammar -----------------------------------------------


def submit(budget: int | None, enable_thinking: bool | None) -> Submit:
    sampling = SamplingParams(max_reasoning_tokens=budget)
    return Submit("a", (), (), sampling, template=TemplateOptions(enable_thinking))


@pytest.mark.parametrize("budget", [None, 0, 7])
@pytest.mark.parametrize("enable_thinking", [None, False, True])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("has_grammar", [False, True])
def test_reasoning_grammar_depends_on_budget_thinking_and_schema(
    budget: int | None, enable_thinking: bool | None, starts: bool, has_grammar: bool
):
    marks = new_marks("<think>", "</think>")
    inner = FakeGrammar(marks.everything.size) if has_grammar else None
    submitted = submit(budget, enable_thinking)
    grammar_of_request = with_reasoning(marks, inner, submitted, starts=starts)
    assert with_reasoning(None, inner, submitted, starts=starts) is inner
    may_begin = enable_thinking is True and budget != 0
    if budget is None and not (has_grammar and (starts or may_begin)):
        assert grammar_of_request is inner
        return
    assert grammar_of_request is not None
    (matcher,) = grammar_of_request.begin(1)
    can_reason = bool(matcher.allowed()[marks.start_ids[0]])
    assert can_reason == ((may_begin or not has_grammar) if not starts else budget != 0)


def test_random_reasoning_ends_at_first_end_mark_of_text():
    """After the first end mark of any sample come blanks, and then the grammar's text."""
    tokens = ["</", "think", ">", "></think>", "</think>", ">[", "k>\n\n", "n", "</thi", "nk>x"]
    marks = new_marks(*tokens, special=False, template=TEMPLATE)
    inner, rng = FakeGrammar(marks.everything.size), np.random.default_rng(0)
    likely = [marks._backend.token_to_id(text) for text in tokens]
    for _ in range(300):
        matcher, sampled = begin(marks, inner, int(rng.integers(0, 60))), list[int]()
        while sampled[-1:] != [END]:
            allowed = np.flatnonzero(matcher.allowed())
            wanted = [i for i in likely if i in allowed]
            sampled.append(int(rng.choice(wanted or allowed)))
            matcher.advance([sampled[-1]])
        reasoning_text, mark, answer = marks._text(sampled[:-1]).partition("</think>")
        assert mark
        assert json.loads(answer.strip() + "]") == [], (reasoning_text, answer)
