"""Conversations in which a tool is called: the right one of four, its arguments, its result.

And answers as JSON by a schema, which are the arguments of a call that nobody makes.
"""

from __future__ import annotations

import random
import string

from demo_model.calls import Arguments, Call, Tool, result_text
from demo_model.conversations import interview, paint, system_prompt
from demo_model.encode import IMAGE_MARK, Conversation, Turn
from demo_model.palette import NAMED
from demo_model.phrases import expand
from demo_model.questions import Interviewer
from demo_model.scenes import SHAPES, Artist, Scene, Thing

Size = tuple[int, int]

COORDINATES = 1000
"""x and y run from 0 to this, over the picture's width and height."""
PROPERTIES = ("shape", "color", "count", "x", "y")
VERBS = ("report", "save", "log", "submit", "record", "send", "store", "add", "note", "print",
         "set", "update", "create", "write", "describe", "file", "push", "post")  # fmt: skip
OBJECTS = ("", "", "_shape", "_object", "_item", "_result", "_thing", "_finding", "_answer",
           "_entry", "_picture", "_data", "_row", "_event")  # fmt: skip
POINTERS = ("click", "tap", "mark", "point", "select", "press", "click_at", "mouse_click", "hover")
LOOKS = ("screenshot", "take_screenshot", "camera", "get_image", "look", "snapshot", "next_picture",
         "capture", "see")  # fmt: skip
OTHERS = ("get_weather", "search", "read_file", "run", "open_url", "calculator", "send_mail",
          "wait", "scroll", "type_text", "bash", "get_time")  # fmt: skip
OTHER_PARAMETERS = ("city", "query", "path", "command", "url", "expression", "text", "seconds")
RESULTS = ("ok", "done", "saved", '{"ok": true}', "true", "success", "1")
CHOOSE = [
    "[Call|Use] the [right|matching|correct] [tool|function] for {thispic}",
    "[Call|Use] the [tool|function] that [fits|matches] {thispic}",
    "Find the [tool|function] that fits {thispic} and call it",
    "Choose the [right|matching] [tool|function][| for {thispic}] and call it",
    "Sort {thispic} with the [right|matching] [tool|function]",
]
FILL = [
    "[Call|Use] {name} [for|on|with] {ref}", "[Call|Use] the {name} [tool|function] for {ref}",
    "Call {name}: {ref}", "Use {name} to [report|save|record] {ref}", "{name}: {ref}",
    "[Report|Save|Record|Log] {ref} with {name}", "Call {name} to record {ref}",
    "Call the [tool|function] for {ref}", "Use the [tool|function] on {ref}",
]  # fmt: skip
POINT = [
    "[Click|Tap|Press|Select|Point at|Mark] {ref}", "[Click|Tap] on {ref}",
    "Move to {ref} and click it", "Use {name} on {ref}", "Call {name} for {ref}",
]  # fmt: skip
FIELDS = [
    "[Describe|Report] {ref} as JSON with {names}", "Give {names} of {ref} as JSON",
    "Answer in JSON: {names} of {ref}", "{names} of {ref}", "[Extract|Find] {names} of {ref}",
    "Describe {ref}", "What is {ref}", "Give me JSON for {ref}", "{ref} as JSON",
]  # fmt: skip
LOOK = [
    "Take a [screenshot|picture]. {question}", "Look first. {question}",
    "Use {name}, then answer: {question}", "Call {name}. {question}", "{question} Use {name}.",
]  # fmt: skip
LOOK_AND_ACT = [
    "Take a [screenshot|picture][ and|, then| and then] {order}", "Look first, then {order}",
    "Use {name}, then {order}", "Call {name} and then {order}", "{name}, then {order}",
]  # fmt: skip


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
    offered = [pointer, *_distractors(rng, rng.randint(1, 3), pointer)]
    usable = [each for each in offered if set(each.parameters) <= set(PROPERTIES)]
    usable = [each for each in usable if each.parameters]
    turns: list[Turn] = []
    for thing in rng.sample(scene.shapes, min(len(scene.shapes), 5)):  # none twice: no copying
        turns += _one_order(rng, scene, thing, rng.choice(usable), offered)
    turns = turns or interview(rng, scene, 1)
    turns[0].question = IMAGE_MARK + turns[0].question.removeprefix(IMAGE_MARK)
    if turns[-1].call and rng.random() < 0.25:
        last = turns[-1].call
        turns[-1] = Turn(turns[-1].question, last.forced_text, turns[-1].task, True, last)
    rng.shuffle(offered)
    return Conversation(turns, system_prompt(rng), [picture], offered)


def _one_order(
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
    call = Call(tool.name, _arguments(scene, thing, tool.parameters))
    task = "tool_point" if points else "tool_fill"
    if lead:
        look = Call(offered[0].name, {})
        order = expand(rng, lead, name=look.name, order=order[0].lower() + order[1:])
        turns = [Turn(_spoken(rng, order), look.text, "tool_look", call=look)]
        turns.append(Turn(result_text(IMAGE_MARK), call.text, task, call=call))
    else:
        turns = [Turn(_spoken(rng, order), call.text, task, call=call)]
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
    parameters = _parameters(rng, most=2) if len(scene.shapes) == 1 else ()
    tools = [Tool(style.format(v=value), parameters) for value in values]
    text = _order(rng, rng.choice(CHOOSE))
    return tools, [_call(rng, tools[0], _arguments(scene, thing, parameters), text, "tool_choice")]


def _filled(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """The user names the tool, or there is one; its arguments are in the picture."""
    thing = rng.choice(scene.shapes)
    parameters = _parameters(rng, most=5)
    tool = Tool(_name(rng), parameters)
    tools = [tool, *_distractors(rng, rng.randint(0, 3), tool)]
    hide = "color" if rng.random() < 0.5 else "shape"
    asker = Interviewer(rng, scene)
    ref = asker.refer(thing, hide=hide) or asker.refer(thing)
    if ref is None:
        return _answered(rng, scene)
    wordings = FILL if len(tools) == 1 else [each for each in FILL if "{name}" in each]
    text = _order(rng, rng.choice(wordings), name=tool.name, ref=ref)
    return tools, [_call(rng, tool, _arguments(scene, thing, parameters), text, "tool_fill")]


def _pointed(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """The arguments are where something is."""
    thing = rng.choice(scene.shapes)
    tool = Tool(rng.choice(POINTERS), ("x", "y"))
    tools = [tool, *_distractors(rng, rng.randint(0, 3), tool)]
    ref = Interviewer(rng, scene).refer(thing)
    if ref is None:
        return _answered(rng, scene)
    is_clear = not any(other.name in POINTERS for other in tools[1:])
    wordings = POINT if is_clear else [each for each in POINT if "{name}" in each]
    text = _order(rng, rng.choice(wordings), name=tool.name, ref=ref)
    return tools, [_call(rng, tool, _arguments(scene, thing, ("x", "y")), text, "tool_point")]


def _as_json(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """An answer that is held to a schema."""
    thing = rng.choice(scene.shapes)
    parameters = _parameters(rng, most=5)
    ref = Interviewer(rng, scene).refer(thing, hide=rng.choice(("color", "shape")))
    if ref is None:
        return _answered(rng, scene)
    *others, last = parameters
    names = f"{', '.join(others)} and {last}" if others else last
    call = Call("", _arguments(scene, thing, parameters))
    text = _order(rng, rng.choice(FIELDS), ref=ref, names=names)
    return [], [Turn(IMAGE_MARK + text, call.arguments_text, "tool_json", True, call)]


def _answered(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """A question that needs no tool, although there are some."""
    turns = interview(rng, scene, rng.choice((1, 1, 2)))
    turns[0].question = IMAGE_MARK + turns[0].question
    return _distractors(rng, rng.randint(1, 4)), turns


def _continued(rng: random.Random, scene: Scene) -> tuple[list[Tool], list[Turn]]:
    """A call, its result as text, and then a question about the picture."""
    tools, turns = _filled(rng, scene)
    if not turns[-1].task.startswith("tool") or turns[-1].is_forced:
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
        acting.append(Tool(_name(rng), _parameters(rng, most=4)))
    tools = [look, *acting, *_distractors(rng, rng.randint(0, 2), look, *acting)]
    turns = list[Turn]()
    for scene in scenes:
        turns += _one_look(rng, scene, tools, acting)
        for _ in range(rng.choice((0, 0, 1, 2))):
            if acting and rng.random() < 0.6:
                thing = rng.choice(scene.shapes)
                turns += _one_order(rng, scene, thing, rng.choice(acting), tools)
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
        turns = _one_order(rng, scene, thing, rng.choice(acting), tools, lead)
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
    if turns[-1].task != "tool_point" or turns[-1].is_forced:
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


def _order(rng: random.Random, wording: str, **slots: str) -> str:
    """One of the wordings above, as people write it."""
    return _spoken(rng, expand(rng, wording, **slots))


def _spoken(rng: random.Random, text: str) -> str:
    """With the manners and the carelessness of people."""
    kind = rng.random()
    if kind < 0.1:
        text = "Please " + text[0].lower() + text[1:]
    elif kind < 0.25:
        text = text[0].lower() + text[1:]
    return text + rng.choice((".", ".", "", "!", ", please."))


def _call(rng: random.Random, tool: Tool, arguments: Arguments, question: str, task: str) -> Turn:
    call, is_forced = Call(tool.name, arguments), rng.random() < 0.25
    answer = call.forced_text if is_forced else call.text
    return Turn(IMAGE_MARK + question, answer, task, is_forced, call)


def _arguments(scene: Scene, thing: Thing, parameters: tuple[str, ...]) -> Arguments:
    known: Arguments = {
        "shape": thing.kind,
        "color": thing.color,
        "count": sum(e.kind == thing.kind and e.color == thing.color for e in scene.shapes),
        "x": round(thing.x * COORDINATES),
        "y": round(thing.y * COORDINATES),
    }
    return {name: known[name] for name in parameters}


def _parameters(rng: random.Random, most: int) -> tuple[str, ...]:
    chosen = rng.sample(PROPERTIES, rng.randint(1, most))
    return tuple(chosen if rng.random() < 0.3 else sorted(chosen, key=PROPERTIES.index))


def _name(rng: random.Random) -> str:
    if rng.random() < 0.2:
        letters = rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))
        return "".join(letters)
    name = rng.choice(VERBS) + rng.choice(OBJECTS)
    if rng.random() < 0.1:
        first, *rest = name.split("_")
        name = first + "".join(each.capitalize() for each in rest)
    return name


def _distractors(rng: random.Random, count: int, *beside: Tool) -> list[Tool]:
    """Tools that nobody asks for, with other names than `beside`."""
    tools, names = list[Tool](), {each.name for each in beside}
    while len(tools) < count:
        kind = rng.random()
        if kind < 0.35:
            other = Tool(_name(rng), _parameters(rng, most=3))
        elif kind < 0.5:
            other = Tool(rng.choice(POINTERS), ("x", "y"))
        elif kind < 0.6:
            other = Tool(rng.choice(LOOKS))
        else:
            parameters = rng.sample(OTHER_PARAMETERS, rng.randint(0, 2))
            other = Tool(rng.choice(OTHERS), tuple(parameters))
        if other.name not in names:
            names.add(other.name)
            tools.append(other)
    return tools
