"""What conversations with tools are made of: names, wordings, arguments of a scene's things."""

from __future__ import annotations

import random
import string

from demo_model.calls import Arguments, Call, Tool
from demo_model.encode import IMAGE_MARK, Turn
from demo_model.phrases import expand
from demo_model.scenes import Scene, Thing

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


def order_text(rng: random.Random, wording: str, **slots: str) -> str:
    """One of the wordings above, as people write it."""
    return spoken(rng, expand(rng, wording, **slots))


def spoken(rng: random.Random, text: str) -> str:
    """With the manners and the carelessness of people."""
    kind = rng.random()
    if kind < 0.1:
        text = "Please " + text[0].lower() + text[1:]
    elif kind < 0.25:
        text = text[0].lower() + text[1:]
    return text + rng.choice((".", ".", "", "!", ", please."))


def call_turn(
    rng: random.Random, tool: Tool, scene: Scene, thing: Thing, question: str, task: str
) -> Turn:
    """The tool is called about the thing, for a client that forces it perhaps."""
    call = Call(tool.name, arguments_for(scene, thing, tool.parameters))
    is_required = rng.random() < 0.25
    answer = call.forced_text if is_required else call.text
    return Turn(IMAGE_MARK + question, answer, task, is_required, call)


def arguments_for(scene: Scene, thing: Thing, parameters: tuple[str, ...]) -> Arguments:
    known: Arguments = {
        "shape": thing.kind,
        "color": thing.color,
        "count": sum(e.kind == thing.kind and e.color == thing.color for e in scene.shapes),
        "x": round(thing.x * COORDINATES),
        "y": round(thing.y * COORDINATES),
    }
    return {name: known[name] for name in parameters}


def some_parameters(rng: random.Random, most: int) -> tuple[str, ...]:
    chosen = rng.sample(PROPERTIES, rng.randint(1, most))
    return tuple(chosen if rng.random() < 0.3 else sorted(chosen, key=PROPERTIES.index))


def tool_name(rng: random.Random) -> str:
    if rng.random() < 0.2:
        letters = rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))
        return "".join(letters)
    name = rng.choice(VERBS) + rng.choice(OBJECTS)
    if rng.random() < 0.1:
        first, *rest = name.split("_")
        name = first + "".join(each.capitalize() for each in rest)
    return name


def distractors(rng: random.Random, count: int, *beside: Tool) -> list[Tool]:
    """Tools that nobody asks for, with other names than `beside`."""
    tools, names = list[Tool](), {each.name for each in beside}
    while len(tools) < count:
        kind = rng.random()
        if kind < 0.35:
            other = Tool(tool_name(rng), some_parameters(rng, most=3))
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
