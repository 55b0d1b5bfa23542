"""Long conversations of an agent: a new picture each turn, with a question or an order about it."""

from __future__ import annotations

import random

from demo_model.calls import Tool, result_text
from demo_model.conversations import Mix, any_scene, interview, paint, system_prompt
from demo_model.encode import IMAGE_MARK, Conversation, Turn
from demo_model.scenes import Artist, Scene
from demo_model.tool_parts import POINTERS, RESULTS, distractors, some_parameters, tool_name
from demo_model.tools import one_order

NEXT_USER = "<|im_end|>\n<|im_start|>user\n"
"""Between the result of a call and the user's next message, without an answer in between."""


def on_screens(rng: random.Random, artist: Artist, sizes: list[tuple[int, int]]) -> Conversation:
    """A turn or two about each picture, all of them about that picture."""
    share = rng.choice((0.0, 0.4, 0.8, 1.0))
    """The share of orders."""
    tools = [Tool(rng.choice(POINTERS), ("x", "y"))]
    if rng.random() < 0.3:
        tools.append(Tool(tool_name(rng), some_parameters(rng, most=3)))
    offered = [*tools, *distractors(rng, rng.choice((0, 0, 1, 2)), *tools)] if share else []
    mix = Mix(words=0.0) if share else Mix(words=0.25, both=0.05)
    scenes = [any_scene(rng, artist, size, mix) for size in sizes]
    pictures = [paint(rng, artist, *each) for each in zip(scenes, sizes, strict=True)]
    turns: list[Turn] = []
    for scene in scenes:
        about = _order(rng, scene, tools, offered) if rng.random() < share else []
        about = about or interview(rng, scene, rng.choice((1, 1, 1, 2)))
        _show(rng, about[0], turns[-1] if turns else None)
        turns += about
    last = turns[-1].call
    if last and rng.random() < 0.5:
        turns[-1] = Turn(turns[-1].question, last.forced_text, turns[-1].task, True, last)
    shuffled = rng.sample(offered, len(offered))
    return Conversation(turns, system_prompt(rng), pictures, shuffled)


def _order(rng: random.Random, scene: Scene, tools: list[Tool], offered: list[Tool]) -> list[Turn]:
    if not scene.shapes:
        return []
    turns = one_order(rng, scene, rng.choice(scene.shapes), rng.choice(tools), offered)
    return turns[:1] if rng.random() < 0.7 else turns


def _show(rng: random.Random, turn: Turn, before: Turn | None) -> None:
    """Put the picture before the question, or into the result of the call `before` it."""
    asked = turn.question.removeprefix(IMAGE_MARK)
    if before is None or before.call is None:
        turn.question = IMAGE_MARK + asked
    elif rng.random() < 0.5:
        turn.question = result_text(rng.choice(RESULTS)) + NEXT_USER + IMAGE_MARK + asked
    else:
        turn.question = result_text(IMAGE_MARK) + NEXT_USER + asked
