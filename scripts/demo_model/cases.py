"""Held-out conversations to score a model by, drawn with the training's own scenes.

Their seeds start where training's never come, and texts may use fonts that it never saw.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from demo_model.batches import random_grid, small_grid
from demo_model.calls import RESULT_BEGIN, RESULT_END, Call, Tool
from demo_model.conversations import Mix, any_scene, interview, on_one_picture, paint, text_only
from demo_model.drawing import Picture
from demo_model.encode import IMAGE_MARK, Conversation, Turn
from demo_model.fonts import DEFAULT_FONT, FontBook, Words, find_fonts
from demo_model.multi_image import on_frames, on_several
from demo_model.pages import on_page
from demo_model.scenes import Artist
from demo_model.tools import on_tools, one_order

FIRST_SEED = 10**9
CATEGORIES = (
    "shape", "color", "count", "where", "yes/no", "read", "read lines", "describe", "several",
    "follow-up", "motion", "talk",
)  # fmt: skip
TOOL_CATEGORIES = {
    "choice": "choose a tool", "fill": "fill arguments", "point": "point", "look": "look",
    "json": "fill a schema",
}  # fmt: skip
"""By the second half of a turn's task."""
PAGE_CATEGORIES = ("cell", "heading", "label", "row", "total")
LONGEST = 30
"""Turns of a long conversation, each with a new picture."""
LONG_SIZE = (448, 448)
CLICK = Tool("click", ("x", "y"))


@dataclass
class Step:
    """One user turn, or the result of a call: its parts in order, and the answers that are right.

    `call` is the one that is right, where one has to be made; `is_required` if a client forces one.
    One without a name is an answer of its arguments alone, by a schema.
    """

    parts: list[str | Picture]
    answers: tuple[str, ...]
    category: str
    call: Call | None = None
    is_required: bool = False
    is_result: bool = False


@dataclass
class Case:
    system: str | None
    steps: list[Step]
    tools: tuple[Tool, ...] = ()


def category_of(task: str, answer: str) -> str:
    """The table's row; 'read' is a word or number alone, 'read lines' all other reading."""
    if task.startswith(("follow", "sure", "thanks")):
        return "follow-up"
    if task.startswith(("nth", "which", "both", "changed", "same", "pictures")):
        return "several"
    if task.startswith("motion"):
        return "motion"
    if task.startswith("yes"):
        return "yes/no"
    if task.startswith("read"):
        alone = task in ("read", "read_number") and " " not in answer
        return "read" if alone else "read lines"
    if task in ("counting", "talk", "no_picture"):
        return "talk"
    if task.startswith(("shape", "bigger", "smaller")):
        return "shape"
    return {"background": "color", "color": "color", "count": "count", "describe": "describe"}.get(
        task, "where"
    )


def to_case(conversation: Conversation) -> Case:
    pictures = iter(conversation.pictures)
    steps = []
    for turn in conversation.turns:
        parts: list[str | Picture] = []
        for number, text in enumerate(turn.question.split(IMAGE_MARK)):
            if number:
                parts.append(next(pictures))
            if text:
                parts.append(text)
        steps.append(Step(parts, (turn.answer,), category_of(turn.task, turn.answer)))
    return Case(conversation.system, steps)


def to_tool_case(conversation: Conversation) -> Case:
    """With calls by name and arguments: the server makes them of the model's text."""
    case = to_case(conversation)
    case.tools = tuple(conversation.tools)
    for step, turn in zip(case.steps, conversation.turns, strict=True):
        step.call, step.is_required = turn.call, turn.is_required
        step.category = TOOL_CATEGORIES.get(turn.task.partition("_")[2], "other")
        if turn.question.startswith(RESULT_BEGIN):
            step.is_result = True
            texts = (part.strip("\n") if isinstance(part, str) else part for part in step.parts)
            marks = RESULT_BEGIN.strip("\n"), RESULT_END.strip("\n")
            step.parts = [p for p in texts if not isinstance(p, str) or p not in marks]
            result = turn.question.removeprefix(RESULT_BEGIN).removesuffix(RESULT_END)
            step.parts = step.parts if IMAGE_MARK in result else [result]
        if turn.task.startswith("result_"):
            step.category = "picture in a result"
    return case


def tool_cases(artist: Artist, per_category: int) -> Iterator[Case]:
    """Cases with tools until every category has that many turns."""
    rng = random.Random(FIRST_SEED + 1)
    seen: Counter[str] = Counter()
    wanted = {*TOOL_CATEGORIES.values(), "picture in a result"}
    while any(seen[name] < per_category for name in wanted):
        sizes = [random_grid(rng) for _ in range(rng.choice((1, 1, 2)))]
        case = to_tool_case(on_tools(rng, artist, sizes))
        if all(seen[step.category] >= per_category for step in case.steps):
            continue
        seen.update(step.category for step in case.steps)
        yield case


def page_cases(artist: Artist, per_category: int) -> Iterator[Case]:
    """Questions about pages of documents until every category has that many turns."""
    rng = random.Random(FIRST_SEED + 2)
    seen: Counter[str] = Counter()
    while any(seen[f"page: {name}"] < per_category for name in PAGE_CATEGORIES):
        conversation = on_page(rng, artist, LONG_SIZE)
        case = to_case(conversation)
        for step, turn in zip(case.steps, conversation.turns, strict=True):
            step.category = turn.task.replace("page_", "page: ")
        seen.update(step.category for step in case.steps)
        yield case


def long_cases(artist: Artist, count: int) -> Iterator[Case]:
    """Conversations of `LONGEST` turns, half of them of questions, half of clicks."""
    rng = random.Random(FIRST_SEED + 3)
    for number in range(count):
        clicks = number % 2 == 1
        steps = [_long_step(rng, artist, turn, clicks=clicks) for turn in range(1, LONGEST + 1)]
        yield Case(None, steps, (CLICK,) if clicks else ())


def _long_step(rng: random.Random, artist: Artist, number: int, *, clicks: bool) -> Step:
    turns: list[Turn] = []
    while not turns:
        scene = any_scene(rng, artist, LONG_SIZE, Mix(words=0.0))
        if scene.shapes and clicks:
            turns = one_order(rng, scene, rng.choice(scene.shapes), CLICK, [CLICK])
        elif scene.shapes:
            turns = interview(rng, scene, 1)
    picture, turn = paint(rng, artist, scene, LONG_SIZE), turns[0]
    first = (number - 1) // 6 * 6 + 1
    category = f"{'clicks' if clicks else 'questions'}, turns {first} to {first + 5}"
    parts: list[str | Picture] = [picture, turn.question.replace(IMAGE_MARK, "")]
    return Step(parts, (turn.answer,), category, turn.call, is_required=clicks)


def artist_for(fonts: Path, words: Path | None, held_out: bool) -> Artist:
    """Draws with the fonts of a folder, or with Pillow's own where it holds none."""
    found = find_fonts(fonts, held_out) if fonts.is_dir() else []
    return Artist(FontBook(found or [DEFAULT_FONT]), Words(words))


def any_case(rng: random.Random, artist: Artist) -> Case:
    kind = rng.random()
    if kind < 0.62:
        return to_case(on_one_picture(rng, artist, random_grid(rng), Mix(words=0.35, both=0.15)))
    if kind < 0.84:
        sizes = [random_grid(rng), random_grid(rng)]
        return to_case(on_several(rng, artist, sizes, Mix()))
    if kind < 0.92:
        return to_case(on_frames(rng, artist, [small_grid(rng)] * rng.randint(2, 4)))
    return to_case(text_only(rng))


def drawn_cases(artist: Artist, per_category: int) -> Iterator[Case]:
    """Cases until every category has that many turns; those that add nothing are left out."""
    rng = random.Random(FIRST_SEED)
    seen: Counter[str] = Counter()
    while any(seen[name] < per_category for name in CATEGORIES):
        case = any_case(rng, artist)
        if all(seen[step.category] >= per_category for step in case.steps):
            continue
        seen.update(step.category for step in case.steps)
        yield case
