"""Thoughts: a grammar waits for their end, and a budget brings it about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.prompt.test_grammars import byte_host
from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher
from vlm_server.interfaces.model_spec import ReasoningFormat
from vlm_server.prompt.reasoning import ReasoningGrammar, with_reasoning
from vlm_server.prompt.reasoning_marks import ReasoningMarks
from vlm_server.protocol import SamplingParams, Submit, TemplateOptions

END = 256
TEMPLATE = r"{{ '<think>\n' + thought + '\n</think>\n\n' + content }}"
SPELLED = ReasoningFormat("<think>", "</think>")


def new_marks(*tokens: str, special: bool = True, template: str = "") -> ReasoningMarks:
    """Marks of a model of bytes and `tokens`."""
    host = byte_host()
    host.backend.add_special_tokens([*tokens]) if special else host.backend.add_tokens([*tokens])
    host.vocabulary_size, host.chat_template = host.backend.get_vocab_size(), template
    return ReasoningMarks(host, SPELLED)


@dataclass
class Json:
    """A grammar whose answers are `[`, and then an end; its matchers, and what they were told."""

    size: int
    told: list[list[int]] = field(default_factory=list)
    is_late: bool = False
    num_closed: int = 0

    def begin(self, count: int) -> list[AnswerMatcher]:
        self.told += [[] for _ in range(count)]
        return [JsonMatcher(self, told) for told in self.told[-count:]]


@dataclass
class JsonMatcher:
    grammar: Json
    told: list[int]
    asked: Sequence[int] = ()
    fault: RequestError | None = None
    can_look_ahead = True
    forced: tuple[int, ...] = ()

    def advance(self, token_ids: Sequence[int]) -> None:
        self.told.extend(token_ids)

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        self.asked = token_ids

    def draft_masks(self) -> Sequence[NDArray[np.bool_]]:
        return [self.allowed()] * len(self.asked)

    def wait(self, seconds: float) -> bool:
        return not self.grammar.is_late

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.grammar.size, dtype=np.bool_)
        mask[END if self.told else id_of("[")] = True
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
    inner: Json | None = None,
    budget: int | None = None,
    starts: bool = True,
    may_begin: bool = True,
) -> AnswerMatcher:
    grammar = ReasoningGrammar(marks, inner, budget, starts=starts, may_begin=may_begin)
    (matcher,) = grammar.begin(1)
    return matcher


def write(matcher: AnswerMatcher, token_ids: list[int]) -> None:
    """Draw these, which must be allowed."""
    for token_id in token_ids:
        assert matcher.wait(0.0)
        assert matcher.allowed()[token_id]
        matcher.advance([token_id])


def forced(matcher: AnswerMatcher) -> list[int]:
    """Draw what follows as long as there is no choice."""
    drawn: list[int] = []
    while matcher.wait(0.0) and matcher.allowed().sum() == 1 and drawn[-1:] != [END]:
        drawn.append(int(matcher.allowed().argmax()))
        matcher.advance([drawn[-1]])
    return drawn


@pytest.fixture(params=["spelled", "control", "added"])
def marks(request: pytest.FixtureRequest) -> ReasoningMarks:
    tokens = () if request.param == "spelled" else ("<think>", "</think>")
    return new_marks(*tokens, special=request.param == "control", template=TEMPLATE)


# ---- grammars after thoughts ---------------------------------------------------------


def test_a_grammar_begins_after_the_thought(marks: ReasoningMarks):
    inner = Json(marks.everything.size)
    matcher = begin(marks, inner)
    inner.is_late = True  # nobody asks it
    write(matcher, ids(marks, "Hm </thin [5] <think>"))
    assert not matcher.allowed()[END]
    write(matcher, ids(marks, "</think>"))
    inner.is_late = False
    assert forced(matcher) == [*ids(marks, "\n\n"), id_of("["), END]
    assert inner.told == [[id_of("["), END]]


def test_a_grammar_waits_only_for_its_own_work(marks: ReasoningMarks):
    inner = Json(marks.everything.size, is_late=True)
    matcher = begin(marks, inner, budget=0)
    for token_id in ids(marks, "</think>\n\n"):
        assert matcher.wait(0.0)
        matcher.advance([token_id])
    assert not matcher.wait(0.0)


def test_an_answer_may_begin_a_thought_or_what_its_grammar_wants(marks: ReasoningMarks):
    inner = Json(marks.everything.size)
    matcher = begin(marks, inner, starts=False)
    first = marks.start_ids[0]
    assert set(np.flatnonzero(matcher.allowed())) == {id_of("["), first}
    write(matcher, [id_of("[")])
    assert inner.told == [[id_of("[")]]
    assert forced(matcher) == [END]
    matcher = begin(marks, inner, starts=False)
    write(matcher, [first])
    assert forced(matcher) == marks.start_ids[1:]
    write(matcher, ids(marks, "Hm</think>"))
    assert forced(matcher) == [*ids(marks, "\n\n"), id_of("["), END]


def test_a_thought_may_be_ruled_out(marks: ReasoningMarks):
    matcher = begin(marks, Json(marks.everything.size), starts=False, may_begin=False)
    assert forced(matcher) == [id_of("["), END]


def test_a_mark_in_pieces_is_one_and_takes_nothing_of_the_answer_along():
    """A token that ends a thought and is more than that would be lost to the grammar."""
    marks = new_marks("></", ">[", ">\n", "nk>{", "k>", "</think>", special=False)
    inner = Json(marks.everything.size)
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


def test_n_answers_are_apart_and_closed(marks: ReasoningMarks):
    inner = Json(marks.everything.size)
    first, second = ReasoningGrammar(marks, inner, 2, starts=True, may_begin=True).begin(2)
    write(first, ids(marks, "ab"))
    assert forced(first) == [*marks.closing_ids, id_of("["), END]
    write(second, ids(marks, "a"))
    assert second.allowed().sum() > 100
    assert inner.told == [[id_of("["), END], []]
    first.close()
    second.close()
    assert inner.num_closed == 2


# ---- budgets -------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_closes_the_thought(marks: ReasoningMarks, budget: int):
    matcher = begin(marks, budget=budget)
    write(matcher, ids(marks, "abcdefg")[:budget])
    assert forced(matcher) == ids(marks, "</think>\n\n")
    write(matcher, [*ids(marks, "free again"), END])


def test_a_thought_within_its_budget_ends_by_itself(marks: ReasoningMarks):
    matcher = begin(marks, budget=30)
    write(matcher, ids(marks, "Hm</think>Text that is longer than the budget of thoughts."))
    assert matcher.allowed() is marks.everything


def test_an_end_may_be_drawn_inside_a_thought_that_nothing_follows(marks: ReasoningMarks):
    matcher = begin(marks, budget=30)
    write(matcher, [*ids(marks, "Hm"), END])


def test_a_budget_holds_for_thoughts_that_the_answer_begins(marks: ReasoningMarks):
    matcher = begin(marks, budget=3, starts=False)
    write(matcher, ids(marks, "\n<think>abc"))
    assert forced(matcher) == marks.closing_ids
    write(matcher, ids(marks, "<think>"))
    assert forced(matcher) == marks.closing_ids, "another one is out of budget at once"
    write(matcher, ids(marks, "Now I speak of <think> and of more than three letters."))


def test_all_masks_inside_a_thought_are_one_array(marks: ReasoningMarks):
    free, held = begin(marks, budget=100), begin(marks, Json(marks.everything.size), 100)
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
def test_blanks_behind_a_thought_are_the_templates(template: str, blanks: str):
    marks = new_marks("</think>", template=template)
    assert marks.closing_ids == [*ids(marks, "</think>"), *ids(marks, blanks)]


# ---- which requests ------------------------------------------------------------------


def submit(budget: int | None, enable_thinking: bool | None) -> Submit:
    sampling = SamplingParams(max_reasoning_tokens=budget)
    return Submit("a", (), (), sampling, template=TemplateOptions(enable_thinking))


@pytest.mark.parametrize("budget", [None, 0, 7])
@pytest.mark.parametrize("enable_thinking", [None, False, True])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("has_grammar", [False, True])
def test_what_a_request_gets(
    budget: int | None, enable_thinking: bool | None, starts: bool, has_grammar: bool
):
    marks = new_marks("<think>", "</think>")
    inner = Json(marks.everything.size) if has_grammar else None
    asked = submit(budget, enable_thinking)
    made = with_reasoning(marks, inner, asked, starts=starts)
    assert with_reasoning(None, inner, asked, starts=starts) is inner
    may_begin = enable_thinking is True and budget != 0
    if budget is None and not (has_grammar and (starts or may_begin)):
        assert made is inner
        return
    assert made is not None
    (matcher,) = made.begin(1)
    can_reason = bool(matcher.allowed()[marks.start_ids[0]])
    assert can_reason == ((may_begin or not has_grammar) if not starts else budget != 0)


def test_thoughts_of_random_tokens_end_where_their_text_does():
    """Whatever is drawn: what follows the first mark is blanks and the grammar's."""
    tokens = ["</", "think", ">", "></think>", "</think>", ">[", "k>\n\n", "n", "</thi", "nk>x"]
    marks = new_marks(*tokens, special=False, template=TEMPLATE)
    inner, rng = Json(marks.everything.size), np.random.default_rng(0)
    likely = [marks._backend.token_to_id(text) for text in tokens]
    for _ in range(300):
        matcher, drawn = begin(marks, inner, int(rng.integers(0, 60))), list[int]()
        while drawn[-1:] != [END]:
            allowed = np.flatnonzero(matcher.allowed())
            wanted = [i for i in likely if i in allowed]
            drawn.append(int(rng.choice(wanted or allowed)))
            matcher.advance([drawn[-1]])
        thought, mark, answer = marks._text(drawn[:-1]).partition("</think>")
        assert mark
        assert json.loads(answer.strip() + "]") == [], (thought, answer)
