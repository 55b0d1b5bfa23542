"""Conversations in which a tool is called: the right one of four, its arguments, its result.

And answers as JSON by a schema, which are the arguments of a call that nobody makes.
"""

from __future__ import annotations

import random

from demo_model.calls import Call, Tool, result_text
from demo_model.conversations import interview, paint, system_prompt
from demo_model.encode import IMAGE_MARK, Conversation, Turn
from demo_model.palette import NAMED
from demo_model.phrases import expand
from demo_model.questions import Interviewer
from demo_model.scenes import SHAPES, Artist, Scene, Thing
from demo_model.tool_parts import (
    CHOOSE,
    FIELDS,
    FILL,
    LOOK,
    LOOK_AND_ACT,
    LOOKS,
    POINT,
    POINTERS,
    PROPERTIES,
    RESULTS,
    arguments_for,
    call_turn,
    distractors,
    order_text,
    some_parameters,
    spoken,
    tool_name,
)

Size = tuple[int, int]


def on_tools(rng: random.Random, artist: Artist, sizes: list[Size]) -> Conversation:
    """A conversation with tools about one picture, or about as many as there are sizes."""
    scenes = [_scene(rng, artist, size) for size in sizes]
    pictures = [paint(rng, artist, *each) for each in zip(scenes, sizes, strict=True)]
    if len(sizes) == 1:
        makers = (_chosen, _filled, _filled, _pointed, _pointed, _answered, _continued, _as_json)
        tools, turns = rng.choice((*makers, _seen_first))(rng, scenes[0])
    else:
        tools, turns = rng.choice((_looked, _looked, _acted))(rng, scenes)
    rng.shuffle(tools)
    return Conversation(turns, system_prompt(rng), pictures, tools)


def on_tool_series(rng: random.Random, artist: Artist, size: Size) -> Conversation:
    """Several orders about one picture, one after the other, with questions between them."""
    scene = artist.shape_scene(rng, *size, rng.choice(("one", "few", "few", "few", "few", "many")))
    picture = paint(rng, artist, scene, size)
    pointer = Tool(rng.choice(POINTERS), ("x", "y"))
    offered = [pointer, *distractors(rng, rng.randint(1, 3), pointer)]
    usable = [each for each in offered if set(each.parameters) <= set(PROPERTIES)]
    usable = [each for each in usable if each.parameters]
    turns: list[Turn] = []
    for thing in rng.sample(scene.shapes, min(len(scene.shapes), 5)):  # none twice: no copying
        turns += one_order(rng, scene, thing, rng.choice(usable), offered)
    turns = turns or interview(rng, scene, 1)
    turns[0].question = IMAGE_MARK + turns[0].question.removeprefix(IMAGE_MARK)
    if turns[-1].call and rng.random() < 0.25:
        last = turns[-1].call
        turns[-1] = Turn(turns[-1].question, last.forced_text, turns[-1].task, True, last)
    rng.shuffle(offered)
    return Conversation(turns, system_prompt(rng), [picture], offered)


def one_order(
    rng: random.Random, scene: Scene, thing: Thing, tool: Tool, offered: list[Tool], lead: str = ""
) -> list[Turn]:
    """An order, what came of it, and a question perhaps; nothing if there are no words for it.

    A `lead` says to call `offered[0]`, whose result is the picture, and then to do {order}.
    """
    asker, points = Interviewer(rng, scene), tool.name in POINTERS
    hides = ("",) if points else ("color", "shape", "")
    ref = asker.refer(thing, hide=rng.choice(hides)) or asker.refer(thing)
    if ref is None:
        return []
    wordings = POINT if points else FILL
    if not points or sum(each.name in POINTERS for each in offered) > 1:
        wordings = [each for each in wordings if "{name}" in each]
    order = expand(rng, rng.choice(wordings), name=tool.name, ref=ref)
    call = Call(tool.name, arguments_for(scene, thing, tool.parameters))
    task = "tool_point" if points else "tool_fill"
    if lead:
        look = Call(offered[0].name, {})
        order = expand(rng, lead, name=look.name, order=order[0].lower() + order[1:])
        turns = [Turn(spoken(rng, order), look.text, "tool_look", call=look)]
        turns.append(Turn(result_text(IMAGE_MARK), call.text, task, call=call))
    else:
        turns = [Turn(spoken(rng, order), call.text, task, call=call)]
    if rng.random() < 0.6:
        turns.append(Turn(result_text(rng.choice(RESULTS)), "Done.", "tool_done"))
        if rng.random() < 0.3:
            turns += interview(rng, scene, 1)
    return turns


# ---- one picture -------------------------------------------------------------------------


def _chosen(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """The tool is named after what is in the picture."""
    thing = scene.shapes[0]
    scene_kinds = {each.kind for each in scene.shapes}
    by_color = len({each.color for each in scene.shapes}) == 1 and rng.random() < 0.5
    if not by_color and len(scene_kinds) > 1:
        return _filled(rng, scene)
    right, pool = (thing.color, tuple(NAMED)) if by_color else (thing.kind, SHAPES)
    values = [right, *rng.sample([v for v in pool if v != right], rng.randint(1, 3))]
    style = rng.choice(("{v}", "on_{v}", "is_{v}", "{v}_found", "found_{v}", "{v}s", "handle_{v}"))
    parameters = some_parameters(rng, most=2) if len(scene.shapes) == 1 else ()
    tools = [Tool(style.format(v=value), parameters) for value in values]
    text = order_text(rng, rng.choice(CHOOSE))
    return tools, [call_turn(rng, tools[0], scene, thing, text, "tool_choice")]


def _filled(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """The user names the tool, or there is one; its arguments are in the picture."""
    thing = rng.choice(scene.shapes)
    parameters = some_parameters(rng, most=5)
    tool = Tool(tool_name(rng), parameters)
    tools = [tool, *distractors(rng, rng.randint(0, 3), tool)]
    hide = "color" if rng.random() < 0.5 else "shape"
    asker = Interviewer(rng, scene)
    ref = asker.refer(thing, hide=hide) or asker.refer(thing)
    if ref is None:
        return _answered(rng, scene)
    wordings = FILL if len(tools) == 1 else [each for each in FILL if "{name}" in each]
    text = order_text(rng, rng.choice(wordings), name=tool.name, ref=ref)
    return tools, [call_turn(rng, tool, scene, thing, text, "tool_fill")]


def _pointed(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """The arguments are where something is."""
    thing = rng.choice(scene.shapes)
    tool = Tool(rng.choice(POINTERS), ("x", "y"))
    tools = [tool, *distractors(rng, rng.randint(0, 3), tool)]
    ref = Interviewer(rng, scene).refer(thing)
    if ref is None:
        return _answered(rng, scene)
    is_clear = not any(other.name in POINTERS for other in tools[1:])
    wordings = POINT if is_clear else [each for each in POINT if "{name}" in each]
    text = order_text(rng, rng.choice(wordings), name=tool.name, ref=ref)
    return tools, [call_turn(rng, tool, scene, thing, text, "tool_point")]


def _as_json(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """An answer that is held to a schema."""
    thing = rng.choice(scene.shapes)
    parameters = some_parameters(rng, most=5)
    ref = Interviewer(rng, scene).refer(thing, hide=rng.choice(("color", "shape")))
    if ref is None:
        return _answered(rng, scene)
    *others, last = parameters
    names = f"{', '.join(others)} and {last}" if others else last
    call = Call("", arguments_for(scene, thing, parameters))
    text = order_text(rng, rng.choice(FIELDS), ref=ref, names=names)
    return [], [Turn(IMAGE_MARK + text, call.arguments_text, "tool_json", True, call)]


def _answered(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """A question that needs no tool, although there are some."""
    turns = interview(rng, scene, rng.choice((1, 1, 2)))
    turns[0].question = IMAGE_MARK + turns[0].question
    return distractors(rng, rng.randint(1, 4)), turns


def _continued(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """A call, its result as text, and then a question about the picture."""
    tools, turns = _filled(rng, scene)
    if not turns[-1].task.startswith("tool") or turns[-1].is_required:
        return tools, turns
    more = interview(rng, scene, 1)[0]
    turns += [Turn(result_text(rng.choice(RESULTS)), "Done.", "tool_done"), more]
    return tools, turns


# ---- pictures in results -----------------------------------------------------------------


def _looked(rng: random.Random, scenes: list[Scene]) -> tuple[list[Tool], list[Turn]]:
    """All pictures come as results of a tool that takes nothing; others act on what they show."""
    look, acting = Tool(rng.choice(LOOKS)), list[Tool]()
    if rng.random() < 0.7:
        acting.append(Tool(rng.choice(POINTERS), ("x", "y")))
    if rng.random() < 0.4:
        acting.append(Tool(tool_name(rng), some_parameters(rng, most=4)))
    tools = [look, *acting, *distractors(rng, rng.randint(0, 2), look, *acting)]
    turns = list[Turn]()
    for scene in scenes:
        turns += _one_look(rng, scene, tools, acting)
        for _ in range(rng.choice((0, 0, 1, 2))):
            if acting and rng.random() < 0.6:
                thing = rng.choice(scene.shapes)
                turns += one_order(rng, scene, thing, rng.choice(acting), tools)
            else:
                turns += interview(rng, scene, 1)
    return tools, turns


def _one_look(
    rng: random.Random, scene: Scene, tools: list[Tool], acting: list[Tool]
) -> list[Turn]:
    """The first of the tools is called, and then an answer given or another tool called."""
    is_clear = not any(other.name in LOOKS for other in tools[1:])
    if acting and rng.random() < 0.5:
        lead = rng.choice([each for each in LOOK_AND_ACT if is_clear or "{name}" in each])
        thing = rng.choice(scene.shapes)
        turns = one_order(rng, scene, thing, rng.choice(acting), tools, lead)
        if turns:
            return turns
    asked, look = interview(rng, scene, 1)[0], Call(tools[0].name, {})
    wording = rng.choice([each for each in LOOK if is_clear or "{name}" in each])
    text = expand(rng, wording, name=look.name, question=asked.question)
    return [
        Turn(text, look.text, "tool_look", call=look),
        Turn(result_text(IMAGE_MARK), asked.answer, f"result_{asked.task}"),
    ]


def _seen_first(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    return _looked(rng, [scene])


def _acted(rng: random.Random, scenes: list[Scene]) -> tuple[list[Tool], list[Turn]]:
    """After each click there is a new screenshot."""
    tools, turns = _pointed(rng, scenes[0])
    if turns[-1].task != "tool_point" or turns[-1].is_required:
        return _looked(rng, scenes)
    for scene in scenes[1:]:
        asked = interview(rng, scene, 1)[0]
        turns.append(Turn(result_text(IMAGE_MARK), "Done.", "tool_done"))
        turns.append(Turn(asked.question, asked.answer, f"result_{asked.task}"))
    return tools, turns


# ---- parts -------------------------------------------------------------------------------


def _scene(rng: random.Random, artist: Artist, size: Size) -> Scene:
    plan = rng.choice(("one", "one", "few", "few", "few", "many", "groups"))
    return artist.shape_scene(rng, *size, plan)
