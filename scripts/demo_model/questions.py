"""Questions on one scene and their true answers. Knows scenes and phrases; no pixels."""

from __future__ import annotations

import random
from collections.abc import Callable

from demo_model.captions import article, caption, plural
from demo_model.encode import Turn
from demo_model.palette import EXTRA, NAMED, NEIGHBOURS
from demo_model.phrases import NUMBER_WORDS, ask, expand, place_phrase
from demo_model.scenes import SHAPES, Scene, Thing

PLACE_NAMES = ("left", "right", "top", "bottom", "middle")
Question = Callable[[], Turn | None]


def yes(value: bool) -> str:
    return "yes" if value else "no"


class Interviewer:
    """Asks about one scene; every method returns a turn, or None if it can't be asked.

    `which`: words for the picture that is meant ('the second image'), where there are several.
    """

    def __init__(self, rng: random.Random, scene: Scene, which: str = "") -> None:
        self.rng = rng
        self.scene = scene
        self.which = which
        self.last: Thing | None = None
        self.last_task = ""

    # --- words for things -----------------------------------------------------

    def unique(self, shape: str | None = None, color: str | None = None) -> Thing | None:
        found = [
            t
            for t in self.scene.shapes
            if (shape is None or t.kind == shape) and (color is None or t.color == color)
        ]
        return found[0] if len(found) == 1 else None

    def refer(self, thing: Thing, hide: str = "") -> str | None:
        """Words that mean just this thing, without naming its `hide` ('color' or 'shape')."""
        rng = self.rng
        if thing.kind == "text":
            return rng.choice(("the text", "the word", "the text"))
        options: list[str] = []
        if hide != "shape" and self.unique(shape=thing.kind):
            options += [f"the {thing.kind}"] * 4
        if hide != "color" and self.unique(color=thing.color):
            options += [f"the {thing.color} {{thing}}"] * 2 + [f"the {thing.color} one"]
        if not hide and self.unique(thing.kind, thing.color):
            options += [f"the {thing.color} {thing.kind}"] * 3
        if len(self.scene.shapes) == 1:
            options += ["the {thing}", "the {thing}", "the {thing}{inpic}"]
            if not self.scene.lines:
                options += ["it", "this {thing}"]
        elif hide and (place := self.extreme(thing)) is not None:
            options += [f"the {{thing}} {place_phrase(rng, place)}"] * 2
        return expand(rng, rng.choice(options)) if options else None

    def extreme(self, thing: Thing) -> str | None:
        """'left', 'right', 'top' or 'bottom', when only this thing is there, clearly."""
        others = [t for t in self.scene.shapes if t is not thing]
        if not others:
            return None
        places = []
        if thing.x < 0.42 and all(t.x > thing.x + 0.2 and t.x > 0.4 for t in others):
            places.append("left")
        if thing.x > 0.58 and all(t.x < thing.x - 0.2 and t.x < 0.6 for t in others):
            places.append("right")
        if thing.y < 0.42 and all(t.y > thing.y + 0.2 and t.y > 0.4 for t in others):
            places.append("top")
        if thing.y > 0.58 and all(t.y < thing.y - 0.2 and t.y < 0.6 for t in others):
            places.append("bottom")
        alone = all(abs(t.x - 0.5) > 0.15 or abs(t.y - 0.5) > 0.15 for t in others)
        if thing.place == "middle" and alone:
            places = ["middle"]
        return self.rng.choice(places) if places else None

    def turn(
        self, task: str, answer: str, ending: str, about: Thing | None = None, **slots: str
    ) -> Turn:
        self.last, self.last_task = about, task
        if self.which:
            slots = {**slots, "inpic": f" in {self.which}", "thispic": self.which}
        text = ask(self.rng, task, ending, **slots)
        if self.which and self.which not in text:
            comma = self.rng.choice((", ", ": ", ", "))
            text = f"In {self.which}{comma}{text[0].lower()}{text[1:]}"
        return Turn(text, answer, task)

    def one(self) -> Thing | None:
        return self.rng.choice(self.scene.shapes) if self.scene.shapes else None

    # --- shapes -----------------------------------------------------------------

    def shape(self) -> Turn | None:
        shapes = self.scene.shapes
        if len(shapes) == 1 and not self.scene.lines and self.rng.random() < 0.7:
            return self.turn("shape", shapes[0].kind, self.pick("word", "shape"), shapes[0])
        thing = self.one()
        if thing is None:
            return None
        kind = self.rng.random()
        if kind < 0.35 and self.unique(color=thing.color):
            return self.turn(
                "shape_by_color", thing.kind, self.pick("word", "shape"), thing, c=thing.color
            )
        if kind < 0.7 and (place := self.extreme(thing)):
            at = place_phrase(self.rng, place)
            return self.turn("shape_by_place", thing.kind, self.pick("word", "shape"), thing, at=at)
        ref = self.refer(thing, hide="shape")
        return (
            ref and self.turn("shape_of", thing.kind, self.pick("word", "shape"), thing, ref=ref)
        ) or None

    def color(self) -> Turn | None:
        thing = self.one() if self.rng.random() < 0.85 or not self.scene.words else None
        if thing is None and len({w.color for w in self.scene.words}) == 1:
            thing = self.scene.words[0]
        ref = thing and self.refer(thing, hide="color")
        if thing is None or ref is None:
            return None
        wrong, wrong2 = self.rng.sample(self.far_colors(thing.color), 2)
        slots = {"ref": ref, "c": thing.color, "wrong": wrong, "wrong2": wrong2}
        return self.turn("color", thing.color, self.pick("word", "color"), thing, **slots)

    def far_colors(self, color: str) -> list[str]:
        return [c for c in NAMED + EXTRA if c != color and frozenset((c, color)) not in NEIGHBOURS]

    def background(self) -> Turn | None:
        if self.scene.background is None:
            return None
        return self.turn("background", self.scene.background, self.pick("word", "color"))

    def pick(self, *kinds: str) -> str:
        return self.rng.choice(kinds)

    def counted(self) -> tuple[str, str, int]:
        """(words in the plural, the same with an article, how many) of some kind of thing."""
        rng, shapes = self.rng, self.scene.shapes
        kind = rng.random()
        thing = self.one()
        present = thing is not None and rng.random() < 0.8
        shape = thing.kind if thing and present else rng.choice(SHAPES)
        color = thing.color if thing and (present or rng.random() < 0.5) else rng.choice(NAMED)
        if kind < 0.28:
            return expand(rng, "{things}"), expand(rng, "[a shape|an object]"), len(shapes)
        if kind < 0.58:
            return plural(shape), article(shape), sum(t.kind == shape for t in shapes)
        if kind < 0.76:
            count = sum(t.color == color for t in shapes)
            return f"{color} {expand(rng, '{things}')}", article(f"{color} shape"), count
        both = f"{color} {shape}"
        count = sum(t.kind == shape and t.color == color for t in shapes)
        return plural(both), article(both), count

    def count(self) -> Turn | None:
        if not self.scene.shapes:
            return None
        whats, _, number = self.counted()
        return self.turn("count", str(number), self.pick("number", "number", "word"), whats=whats)

    # --- places -------------------------------------------------------------------

    def locatable(self) -> Thing | None:
        texts = self.scene.words if len(self.scene.lines) == 1 else []
        pool = self.scene.shapes + texts[:1]
        return self.rng.choice(pool) if pool else None

    def where(self) -> Turn | None:
        thing = self.locatable()
        ref = thing and self.refer(thing)
        if thing is None or ref is None:
            return None
        kind = self.rng.random()
        if kind < 0.16 and abs(thing.x - 0.5) > 0.1:
            return self.turn(
                "where_lr", "left" if thing.x < 0.5 else "right", "word", thing, ref=ref
            )
        if kind < 0.26 and abs(thing.y - 0.5) > 0.1:
            return self.turn(
                "where_tb", "top" if thing.y < 0.5 else "bottom", "word", thing, ref=ref
            )
        if thing.place is None:
            return None
        return self.turn("where", thing.place, self.pick("place", "place", "free"), thing, ref=ref)

    def size(self) -> Turn | None:
        shapes = sorted(self.scene.shapes, key=lambda t: t.radius)
        if len(shapes) < 2 or len({t.kind for t in shapes}) < len(shapes):
            return None
        if shapes[-1].radius > 1.45 * shapes[-2].radius and self.rng.random() < 0.6:
            return self.turn("bigger", shapes[-1].kind, self.pick("word", "shape"), shapes[-1])
        if shapes[1].radius > 1.45 * shapes[0].radius:
            return self.turn("smaller", shapes[0].kind, self.pick("word", "shape"), shapes[0])
        return None

    # --- yes or no -------------------------------------------------------------------

    def yes_no(self) -> Turn | None:
        options = [self.yes_exists, self.yes_exists, self.yes_color, self.yes_shape]
        options += [self.yes_where, self.yes_count, self.yes_relation, self.yes_relation]
        if self.scene.lines:
            options += [self.yes_read] * 5
        options += [self.yes_text] * (3 if self.scene.lines else 1)
        return self.rng.choice(options)()

    def yes_exists(self) -> Turn | None:
        whats, what, number = self.counted()
        if whats in ("shapes", "objects", "figures", "things"):
            return None
        return self.turn("yes_exists", yes(number > 0), "yes", whats=whats, a_what=what)

    def yes_color(self) -> Turn | None:
        thing = self.one()
        ref = thing and self.refer(thing, hide="color")
        if thing is None or ref is None:
            return None
        truth = self.rng.random() < 0.5
        color = thing.color if truth else self.rng.choice(self.far_colors(thing.color))
        return self.turn("yes_color", yes(truth), "yes", thing, ref=ref, c=color)

    def yes_shape(self) -> Turn | None:
        thing = self.one()
        ref = thing and self.refer(thing, hide="shape")
        if thing is None or ref is None:
            return None
        truth = self.rng.random() < 0.5
        shape = thing.kind if truth else self.rng.choice([s for s in SHAPES if s != thing.kind])
        return self.turn("yes_shape", yes(truth), "yes", thing, ref=ref, a_what=article(shape))

    def yes_where(self) -> Turn | None:
        thing = self.locatable()
        ref = thing and self.refer(thing)
        if thing is None or ref is None or thing.place is None:
            return None
        if self.rng.random() < 0.5:
            parts = thing.place.split(" ")
            place = self.rng.choice([*parts, thing.place])
            return self.turn(
                "yes_where", "yes", "yes", thing, ref=ref, at=place_phrase(self.rng, place)
            )
        wrong = [p for p in PLACE_NAMES if p not in thing.place.split(" ")]
        at = place_phrase(self.rng, self.rng.choice(wrong))
        return self.turn("yes_where", "no", "yes", thing, ref=ref, at=at)

    def yes_count(self) -> Turn | None:
        whats, _, number = self.counted()
        if not 1 < number < 7:
            return None
        truth = self.rng.random() < 0.5
        said = number if truth else self.rng.choice([n for n in (2, 3, 4, 5) if n != number])
        n = str(said) if self.rng.random() < 0.4 else NUMBER_WORDS[said]
        return self.turn("yes_count", yes(truth), "yes", whats=whats, n=n)

    def yes_relation(self) -> Turn | None:
        if len(self.scene.shapes) < 2:
            return None
        a, b = self.rng.sample(self.scene.shapes, 2)
        one, other = self.refer(a, hide="place"), self.refer(b, hide="place")
        if one is None or other is None or "one" in other.split():
            return None
        dx, dy = b.x - a.x, b.y - a.y
        tests = []
        if abs(dx) > 0.15:
            tests += [("yes_left", dx > 0), ("yes_right", dx < 0)]
        if abs(dy) > 0.15:
            tests += [("yes_above", dy > 0), ("yes_below", dy < 0)]
        if max(a.radius, b.radius) > 1.45 * min(a.radius, b.radius):
            tests += [("yes_bigger", a.radius > b.radius), ("yes_smaller", a.radius < b.radius)]
        if not tests:
            return None
        task, truth = self.rng.choice(tests)
        return self.turn(task, yes(truth), "yes", a, ref=one, other=other)

    def yes_text(self) -> Turn | None:
        return self.turn("yes_text", yes(bool(self.scene.lines)), "yes")

    def yes_read(self) -> Turn | None:
        if not self.scene.lines:
            return None
        rng = self.rng
        truth = rng.random() < 0.5
        word = " ".join(self.scene.lines)
        if len(word) > 10:
            return None
        shown = word
        if not truth:
            word = misread(rng, word)
        quote = rng.choice(("", "'", '"', '"', "'"))
        return self.turn("yes_read", yes(word == shown), "yes", w=word, q=quote)

    # --- reading ----------------------------------------------------------------------

    def read(self) -> Turn | None:
        lines = self.scene.lines
        if not lines:
            return None
        rng = self.rng
        if len(lines) > 1 and rng.random() < 0.45:
            number = rng.randrange(len(lines))
            return self.read_line(number)
        text = " ".join(lines)
        if len(lines) == 1 and text.isdigit() and rng.random() < 0.5:
            return self.turn("read_number", text, self.pick("number", "number", "word"))
        return self.turn("read", text, "text")

    def read_line(self, number: int) -> Turn:
        rng, lines = self.rng, self.scene.lines
        names = [("first", "second", "third", "fourth", "fifth")[number]]
        if number == len(lines) - 1:
            names += ["last", "bottom"]
        if number == 0:
            names.append("top")
        colors = [w.color for w in self.scene.words]
        flat = len(colors) == len(lines)
        if flat and colors.count(colors[number]) == 1 and rng.random() < 0.4:
            near = any(frozenset((colors[number], c)) in NEIGHBOURS for c in colors)
            if not near:
                return self.turn("read_color", lines[number], "text", c=colors[number])
        if number in (0, len(lines) - 1) and rng.random() < 0.25:
            at = place_phrase(rng, "top" if number == 0 else "bottom")
            return self.turn("read_at", lines[number], "text", at=at)
        slots = {"nth": rng.choice(names), "n": str(number + 1)}
        return self.turn("read_line", lines[number], "text", **slots)

    # --- sentences ----------------------------------------------------------------------

    def describe(self) -> Turn | None:
        sentence = caption(self.scene)
        return (sentence and self.turn("describe", sentence, "sentence")) or None

    # --- follow-ups -----------------------------------------------------------------------

    def follow_up(self) -> Turn | None:
        """Leans on the turn before: 'And what colour is it?', 'And the square?', 'Are you sure?'"""
        rng, thing, task = self.rng, self.last, self.last_task
        if rng.random() < 0.12 and task:
            self.last_task = ""
            return Turn(ask(rng, "sure"), "yes", "sure")
        if thing is None or thing.kind == "text":
            return None
        kind = rng.random()
        if kind < 0.35 and task in ("color", "where", "follow_color", "follow_where"):
            return self.same_of_another(thing, task)
        if kind < 0.65 and "color" not in task:
            return self.turn("follow_color", thing.color, self.pick("word", "color"), thing)
        if kind < 0.85 and thing.place and "where" not in task:
            return self.turn("follow_where", thing.place, "place", thing)
        if "shape" not in task and task in ("color", "where", "follow_color"):
            return self.turn("follow_shape", thing.kind, self.pick("word", "shape"), thing)
        return None

    def same_of_another(self, thing: Thing, task: str) -> Turn | None:
        others = [t for t in self.scene.shapes if t is not thing]
        hide = "color" if "color" in task else ""
        if not others:
            return None
        other = self.rng.choice(others)
        ref = self.refer(other, hide=hide)
        answer = other.color if hide else other.place
        if ref is None or answer is None or " one" in ref:
            return None
        turn = self.turn("follow_other", answer, "word", other, ref=ref)
        self.last_task = "color" if hide else "where"
        return turn


def misread(rng: random.Random, word: str) -> str:
    """Another text: one character off, or a quite different one."""
    kind = rng.random()
    if kind < 0.5 and len(word) > 1:
        at = rng.randrange(len(word))
        pool = "0123456789" if word[at].isdigit() else "abcdefghkmnprtwy"
        new = rng.choice(pool)
        return word[:at] + (new.upper() if word[at].isupper() else new) + word[at + 1 :]
    other = rng.choice(("HELLO", "Stop", "open", "4711", "Total", "EXIT", "menu", "Price", "123"))
    return other if rng.random() < 0.7 or len(word) < 3 else word[::-1]
