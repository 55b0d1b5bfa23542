"""A scene in one sentence, and the grammar of naming things."""

from __future__ import annotations

from itertools import pairwise

from demo_model.phrases import NUMBER_WORDS
from demo_model.scenes import Scene, Thing


def plural(shape: str) -> str:
    return shape + "s"


def article(word: str) -> str:
    return f"an {word}" if word[0] in "aeio" else f"a {word}"


PLACE_IN_SENTENCE = {
    "left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom",
    "middle": "in the middle", "top left": "at the top left", "top right": "at the top right",
    "bottom left": "at the bottom left", "bottom right": "at the bottom right",
}  # fmt: skip


def caption(scene: Scene) -> str | None:
    """'A red circle on the left and two blue squares.': groups from left to right."""
    groups: dict[tuple[str, str], list[Thing]] = {}
    for thing in sorted(scene.shapes, key=lambda t: t.x):
        groups.setdefault((thing.color, thing.kind), []).append(thing)
    if len(groups) > 3 or len(scene.lines) > 1 or not (groups or scene.lines):
        return None
    firsts = [things[0].x for things in groups.values()]
    if any(b - a < 0.06 for a, b in pairwise(firsts)):
        return None
    parts = []
    for (color, kind), things in groups.items():
        if len(things) > 1:
            columns = {t.column for t in things}
            if None in columns:
                return None
            side = columns.pop() if len(columns) == 1 else "middle"
            where = f" {PLACE_IN_SENTENCE[side]}" if side in ("left", "right") else ""
            parts.append(f"{NUMBER_WORDS[len(things)]} {color} {plural(kind)}{where}")
        elif things[0].place is None:
            return None
        else:
            parts.append(f"{article(color)} {kind} {PLACE_IN_SENTENCE[things[0].place]}")
    if scene.lines:
        parts.append(f'the text "{scene.lines[0]}"')
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return text[0].upper() + text[1:] + "."
