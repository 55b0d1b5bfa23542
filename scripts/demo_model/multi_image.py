# ruff: noqa: E501 - wordings stand on one line each
"""Conversations on two or three pictures, on changes between them, and on short videos."""

from __future__ import annotations

import copy
import random

from demo_model.captions import article, plural
from demo_model.conversations import Mix, any_scene, finish, interview, paint, system_prompt
from demo_model.drawing import Picture, ground, look
from demo_model.encode import IMAGE_MARK, VIDEO_MARK, Conversation, Turn
from demo_model.palette import NAMED, visible_shade
from demo_model.phrases import dress, expand
from demo_model.questions import yes
from demo_model.scenes import SHAPES, Artist, Scene, Thing, moved, recolored
from demo_model.shape import VIDEO_FPS

Size = tuple[int, int]
ORDINALS = ("first", "second", "third")

HAS = [
    "Which {pic} [has|shows|contains] {a_what}", "In which {pic} is there {a_what}", "Which {pic} has {a_what} in it",
    "Which of the {pics} [has|shows|contains] {a_what}", "Which {pic} shows {a_what}", "Which one has {a_what}",
    "Where is {a_what}: in the first [or the|or] second {pic}", "Where do you see {a_what}, in the first or the second {pic}",
    "Which of these {pics} contains {a_what}", "{a_what}: which {pic}", "In which of the {pics} do you see {a_what}",
    "Which {pic} contains {a_what}", "Does the first or the second {pic} have {a_what}",
]  # fmt: skip
HAS_ENDINGS = (
    "", "", "", " Answer the first, the second, both or neither.", " The first or the second?", " Answer briefly.",
    " First, second, both or neither?", " Reply with the first or the second.",
)  # fmt: skip
MORE = [
    "Which {pic} has more [shapes|objects]",
    "Which {pic} shows more [shapes|objects]",
    "In which {pic} are there more [shapes|objects]",
    "Which {pic} contains more [shapes|things]",
]
SAME = [
    "Are the [two |]{pics} the same",
    "Are [these|both] {pics} identical",
    "Are the {pics} equal",
    "Do both {pics} show the same",
    "Is the second {pic} the same as the first",
]
CHANGED = [
    "What changed", "What has changed", "What changed between the {pics}", "What is the difference", "What is different",
    "What is different in the second {pic}", "What's the difference between the {pics}", "Describe the change", "What changed from the first to the second {pic}",
    "What is the difference between the two {pics}", "Spot the difference", "What is new",
]  # fmt: skip
BOTH = ["Do both {pics} [show|have|contain] {a_what}", "Is there {a_what} in both {pics}"]
NUMBER = [
    "How many {pics} [do you see|are there|did I send|have I sent]",
    "How many {pics} did you get",
]
MOVES = [
    "[Which way|In which direction|Which direction|In what direction] does {ref} move", "Where does {ref} move", "Which way is {ref} moving",
    "In which direction is {ref} moving", "What direction does {ref} move in", "Which way does {ref} go", "Does {ref} move left, right, up or down",
    "Describe the movement of {ref}", "[How|Where] does {ref} move", "Is {ref} moving left, right, up or down", "What is the direction of {ref}",
    "In which direction does {ref} [go|travel]",
]  # fmt: skip
MOVE_ENDINGS = (
    "",
    "",
    "",
    " Answer left, right, up or down.",
    " One word.",
    " left, right, up or down?",
    " Answer in one word.",
)
PICS = "[pictures|pictures|images|images|photos|screenshots]"
VIDEO_WORDS = "[video|video|clip|animation]"


def said(rng: random.Random, templates: list[str], ending: str = "", **slots: str) -> str:
    text = dress(rng, expand(rng, rng.choice(templates).replace("{pics}", PICS), **slots), None)
    if ending and text[-1].isalnum():
        text += "."
    return text + ending


def what_of(rng: random.Random, thing: Thing) -> tuple[str, str, str | None, str | None]:
    """(with article, plural, shape or None, colour or None)."""
    kind = rng.random()
    if kind < 0.5:
        return article(thing.kind), plural(thing.kind), thing.kind, None
    if kind < 0.65:
        return article(thing.color) + " shape", f"{thing.color} shapes", None, thing.color
    both = f"{thing.color} {thing.kind}"
    return article(both), plural(both), thing.kind, thing.color


def has(scene: Scene, shape: str | None, color: str | None) -> bool:
    return any(
        (shape is None or t.kind == shape) and (color is None or t.color == color)
        for t in scene.shapes
    )


def which_has(rng: random.Random, scenes: list[Scene]) -> Turn | None:
    things = [t for scene in scenes for t in scene.shapes]
    if not things or rng.random() < 0.12:
        thing = Thing(rng.choice(SHAPES), rng.choice(NAMED), (0, 0, 0), 0, 0, 0)
    else:
        thing = rng.choice(things)
    a_what, _, shape, color = what_of(rng, thing)
    found = [i for i, scene in enumerate(scenes) if has(scene, shape, color)]
    if len(scenes) == 2:
        answers = {0: "neither", 2: "both"}
        answer = answers.get(len(found)) or f"the {ORDINALS[found[0]]}"
        if rng.random() < 0.12:
            text = said(rng, BOTH, a_what=a_what)
            return Turn(text, yes(len(found) == 2), "both_have")
        return Turn(said(rng, HAS, rng.choice(HAS_ENDINGS), a_what=a_what), answer, "which_has")
    if len(found) != 1:
        return None
    templates = [t for t in HAS if "second" not in t]
    return Turn(said(rng, templates, a_what=a_what), f"the {ORDINALS[found[0]]}", "which_has")


def word_in(rng: random.Random, scenes: list[Scene]) -> Turn | None:
    """Which picture says a word."""
    texts = [" ".join(scene.lines) for scene in scenes]
    known = [t for t in texts if t and len(t) <= 9 and texts.count(t) == 1]
    if not known:
        return None
    text = rng.choice(known)
    quote = rng.choice(("'", '"'))
    templates = [
        "Which {pic} says {q}{w}{q}",
        "Which {pic} [has|contains] the [word|text] {q}{w}{q}",
        "In which {pic} is {q}{w}{q} written",
    ]
    return Turn(
        said(rng, templates, w=text, q=quote), f"the {ORDINALS[texts.index(text)]}", "which_says"
    )


def more(rng: random.Random, scenes: list[Scene]) -> Turn | None:
    counts = [len(scene.shapes) for scene in scenes]
    top = max(counts)
    if counts.count(top) != 1 or any(scene.lines for scene in scenes):
        return None
    return Turn(said(rng, MORE), f"the {ORDINALS[counts.index(top)]}", "which_more")


def about_one(rng: random.Random, scenes: list[Scene]) -> Turn | None:
    number = rng.randrange(len(scenes))
    noun = expand(rng, "{pic}")
    names = [f"the {ORDINALS[number]} {noun}"] * 3 + [f"{noun} {number + 1}"]
    if number == len(scenes) - 1:
        names.append(f"the last {noun}")
    if number == 0 and len(scenes) == 2:
        names.append(f"the {ORDINALS[0]} one")
    turn = interview(rng, scenes[number], 1, which=rng.choice(names))[0]
    turn.task = f"nth_{turn.task}"
    return turn


def how_many_pictures(rng: random.Random, scenes: list[Scene]) -> Turn | None:
    return Turn(said(rng, NUMBER), str(len(scenes)), "pictures")


def questions_on_all(rng: random.Random, scenes: list[Scene], turns: int) -> list[Turn]:
    makers = [which_has, about_one, more, word_in, how_many_pictures]
    found: list[Turn] = []
    for _ in range(turns * 4):
        turn = rng.choices(makers, (5, 5, 0.8, 1.2, 0.25))[0](rng, scenes)
        if turn and turn.question and all(t.question != turn.question for t in found):
            found.append(turn)
        if len(found) == turns:
            break
    return found or [Turn(said(rng, NUMBER), str(len(scenes)), "pictures")]


def marks(rng: random.Random, count: int, text: str) -> str:
    """The pictures' marks around the question: before it, labelled, or after it."""
    kind = rng.random()
    if kind < 0.62:
        return IMAGE_MARK * count + text
    if kind < 0.80:
        noun = rng.choice(("Picture", "Image", "picture", "image"))
        return "".join(f"{noun} {i + 1}: {IMAGE_MARK}" for i in range(count)) + text
    if kind < 0.88 and count == 2:
        return f"First: {IMAGE_MARK} Second: {IMAGE_MARK} {text}"
    return text + IMAGE_MARK * count


def on_several(rng: random.Random, artist: Artist, sizes: list[Size], mix: Mix) -> Conversation:
    kind = rng.random()
    if kind < 0.24 and len(sizes) == 2 and sizes[0] == sizes[1]:
        return on_change(rng, artist, sizes)
    mix = Mix(words=0.25, both=0.08)
    scenes = [any_scene(rng, artist, size, mix) for size in sizes]
    pictures = [paint(rng, artist, scene, size) for scene, size in zip(scenes, sizes, strict=True)]
    if kind < 0.5:
        turns = one_after_another(rng, scenes)
    else:
        turns = questions_on_all(rng, scenes, rng.choice((1, 2, 3, 4, 5)))
        turns[0].question = marks(rng, len(sizes), turns[0].question)
    return Conversation(turns, system_prompt(rng), pictures)


def one_after_another(rng: random.Random, scenes: list[Scene]) -> list[Turn]:
    """A new picture in a later turn: questions mean the newest, or name one."""
    turns: list[Turn] = []
    for number, scene in enumerate(scenes):
        asked = interview(rng, scene, rng.choice((1, 1, 2, 3)))
        lead = ""
        if number and rng.random() < 0.4:
            lead = rng.choice(
                (
                    "And now? ",
                    "Here is another one. ",
                    "Next picture. ",
                    "A new screenshot. ",
                    "And this one? ",
                    "Now look at this. ",
                )
            )
        asked[0].question = IMAGE_MARK + lead + asked[0].question
        turns += asked
    if rng.random() < 0.7:
        turns += questions_on_all(rng, scenes, rng.choice((1, 2)))
    return turns


def on_change(rng: random.Random, artist: Artist, sizes: list[Size]) -> Conversation:
    """The same scene twice, with one thing changed."""
    size = sizes[0]
    scene = artist.shape_scene(rng, *size, rng.choice(("one", "few")))
    assert scene.ground is not None
    assert scene.look is not None
    scene.look.shadow = False
    after = copy.copy(scene)
    after.shapes = list(scene.shapes)
    index = rng.randrange(len(scene.shapes))
    thing = scene.shapes[index]
    only = sum(t.kind == thing.kind for t in scene.shapes) == 1
    name = f"the {thing.kind}" if only else f"the {thing.color} {thing.kind}"
    answer = "Nothing changed."
    kind = rng.random()
    if kind < 0.34:
        after.shapes[index] = recolored(rng, thing, scene.ground.colors)
        if after.shapes[index] is not thing:
            answer = f"{name.capitalize()} is now {after.shapes[index].color}."
    elif kind < 0.55 and len(scene.shapes) > 1:
        del after.shapes[index]
        answer = f"{name.capitalize()} is gone."
        if rng.random() < 0.5:
            scene.shapes, after.shapes = after.shapes, scene.shapes
            answer = f"{article(thing.color).capitalize()} {thing.kind} was added."
    elif kind < 0.85 and len(scene.shapes) == 1:
        answer = _move(rng, after, index)
    same = answer == "Nothing changed."
    pictures = _paint_alike(rng, artist, [scene, after], sizes)
    turns = [Turn(said(rng, CHANGED), answer, "changed")]
    if rng.random() < 0.3:
        turns.insert(0, Turn(said(rng, SAME), yes(same), "same"))
    if rng.random() < 0.5:
        turns += questions_on_all(rng, [scene, after], 1)
    if rng.random() < 0.3:
        first = interview(rng, scene, 1)
        first[0].question = IMAGE_MARK + first[0].question
        turns[0].question = IMAGE_MARK + turns[0].question
        turns = first + turns
    else:
        turns[0].question = marks(rng, 2, turns[0].question)
    return Conversation(turns, system_prompt(rng), pictures)


def _move(rng: random.Random, scene: Scene, index: int) -> str:
    thing = scene.shapes[index]
    way = rng.choice(("left", "right", "up", "down"))
    path = motion(rng, way, thing.radius)
    if path is None:
        return "Nothing changed."
    (x0, y0), (x1, y1) = path
    thing.x, thing.y = x0, y0
    scene.shapes[index] = moved(thing, x1, y1)
    to = {"left": "to the left", "right": "to the right"}.get(way, way)
    return f"The {thing.kind} moved {to}."


def _paint_alike(
    rng: random.Random, artist: Artist, scenes: list[Scene], sizes: list[Size]
) -> list[Picture]:
    """The same strokes for both: each is drawn from the same seed."""
    seed = rng.getrandbits(32)
    pictures = []
    for scene, size in zip(scenes, sizes, strict=True):
        picture = artist.draw(random.Random(seed), scene, *sizes[0])
        pictures.append(finish(rng, picture, size))
    return pictures


def motion(
    rng: random.Random, way: str, radius: float
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Start and end of a move of at least a quarter of the picture, or None if too large."""
    margin = radius * 1.05
    room = 1 - 2 * margin
    if room < 0.28:
        return None
    step = rng.uniform(0.26, room)
    start = margin + rng.uniform(0, room - step)
    ends = (start, start + step) if way in ("right", "down") else (start + step, start)
    across = rng.uniform(margin, 1 - margin)
    drift = across + rng.uniform(-0.03, 0.03)
    if way in ("left", "right"):
        return (ends[0], across), (ends[1], drift)
    return (across, ends[0]), (drift, ends[1])


def frames_of_motion(
    rng: random.Random, artist: Artist, size: Size, count: int
) -> tuple[Scene, str, list[Picture]]:
    back = ground(rng, *size)
    name, ink = visible_shade(rng, back.colors, 150)
    radius = rng.uniform(0.07, 0.22)
    thing = Thing(rng.choice(SHAPES), name, ink, 0.5, 0.5, radius)
    way = rng.choice(("left", "right", "up", "down"))
    path = motion(rng, way, radius)
    assert path is not None
    scene = Scene([thing], background=back.name, ground=back, look=look(rng))
    seed = rng.getrandbits(32)
    pictures = []
    for number in range(count):
        at = number / (count - 1)
        thing.x = path[0][0] + (path[1][0] - path[0][0]) * at
        thing.y = path[0][1] + (path[1][1] - path[0][1]) * at
        pictures.append(artist.draw(random.Random(seed), scene, *size))
    return scene, way, pictures


def motion_turns(rng: random.Random, scene: Scene, way: str, noun: str) -> list[Turn]:
    thing = scene.shapes[0]
    ref = rng.choice(
        (
            f"the {thing.kind}",
            f"the {thing.color} {thing.kind}",
            "it",
            "the {thing}",
            "the shape",
            "the object",
        )
    )
    ref = expand(rng, ref)
    turns = [Turn(said(rng, MOVES, rng.choice(MOVE_ENDINGS), ref=ref), way, "motion")]
    extra = []
    if rng.random() < 0.4:
        extra.append(
            Turn(
                said(
                    rng,
                    [
                        f"[What|Which] shape [moves|is it|is in the {noun}]",
                        f"What [moves|is] in the {noun}",
                    ],
                ),
                thing.kind,
                "motion_shape",
            )
        )
    if rng.random() < 0.4:
        extra.append(
            Turn(
                said(
                    rng,
                    ["[What|Which] {color} is {ref}", f"What {{color}} is the shape in the {noun}"],
                    ref=ref if ref != "it" else "the shape",
                ),
                thing.color,
                "motion_color",
            )
        )
    turns += extra
    rng.shuffle(turns)
    return turns


def on_video(rng: random.Random, artist: Artist, size: Size, groups: int) -> Conversation:
    """A video of `groups` pairs of frames; pictures holds every frame."""
    scene, way, frames = frames_of_motion(rng, artist, size, 2 * groups)
    fps = rng.choice((VIDEO_FPS, VIDEO_FPS, VIDEO_FPS, 1.0, 4.0, 5.0, 8.0, 10.0))
    stamps = [(2 * i + 0.5) / fps for i in range(groups)]
    clip = "".join(f"<{seconds:.1f} seconds>{VIDEO_MARK}" for seconds in stamps)
    turns = motion_turns(rng, scene, way, expand(rng, VIDEO_WORDS))
    text = turns[0].question
    turns[0].question = text + clip if rng.random() < 0.12 else clip + text
    return Conversation(turns, system_prompt(rng), frames)


def on_frames(rng: random.Random, artist: Artist, sizes: list[Size]) -> Conversation:
    """The same motion in separate pictures."""
    scene, way, frames = frames_of_motion(rng, artist, sizes[0], len(sizes))
    pictures = [finish(rng, f, size) for f, size in zip(frames, sizes, strict=True)]
    turns = motion_turns(rng, scene, way, rng.choice(("pictures", "images", "frames")))
    turns[0].question = marks(rng, len(sizes), turns[0].question)
    return Conversation(turns, system_prompt(rng), pictures)
