"""Whole conversations: one picture or several, a video, or text alone. The training mix."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

import cv2
import numpy as np
from PIL import Image

from demo_model.captions import caption
from demo_model.drawing import Picture
from demo_model.encode import IMAGE_MARK, Conversation, Turn
from demo_model.questions import Interviewer
from demo_model.scenes import Artist, Scene
from demo_model.shape import MAX_PIXELS, MIN_PIXELS, smart_resize
from demo_model.smalltalk import SYSTEM_PROMPTS, small_talk

Size = tuple[int, int]
PLANS = ("one", "one", "few", "few", "few", "many", "many", "groups", "groups")


@dataclass(frozen=True)
class Mix:
    """Shares of scenes with words alone, and with words beside shapes."""

    words: float = 0.50
    both: float = 0.14


def source_size(rng: random.Random, target: Size) -> Size:
    """A size that the processor resizes to `target`: what a person might have sent."""
    height, width = target
    for _ in range(12):
        scale = 1.0
        if height * width > 0.72 * MAX_PIXELS:
            scale = rng.choice((1.0, 1.15, 1.4, 1.75, 2.2))
        elif height * width < 1.35 * MIN_PIXELS:
            scale = rng.choice((0.45, 0.6, 0.7, 0.8, 0.9, 1.0))
        high = round(height * scale * rng.uniform(0.97, 1.05))
        wide = round(width * scale * rng.uniform(0.97, 1.05))
        if smart_resize(high, wide) == target:
            return high, wide
    return target


def paint(rng: random.Random, artist: Artist, scene: Scene, target: Size) -> Picture:
    """Draw at a sender's size, spoil a little as JPEG does, resize as the processor does."""
    size = source_size(rng, target) if rng.random() < 0.4 else target
    if size != target and scene.ground is not None:
        scene.ground.pixels = cv2.resize(scene.ground.pixels, (size[1], size[0]))
    return finish(rng, artist.draw(rng, scene, *size), target)


def finish(rng: random.Random, picture: Picture, target: Size) -> Picture:
    if rng.random() < 0.07:
        quality = [cv2.IMWRITE_JPEG_QUALITY, rng.randint(35, 92)]
        _, data = cv2.imencode(".jpg", picture[..., ::-1], quality)
        picture = cv2.imdecode(data, cv2.IMREAD_COLOR)[..., ::-1]
    if picture.shape[:2] != target:
        image = Image.fromarray(np.ascontiguousarray(picture))
        picture = np.asarray(image.resize((target[1], target[0]), Image.Resampling.BICUBIC))
    return picture


def any_scene(rng: random.Random, artist: Artist, size: Size, mix: Mix) -> Scene:
    kind = rng.random()
    if kind < mix.words:
        count = rng.choice((1, 1, 1, 1, 2, 2, 3, 4)) if artist.ease < 0.5 else rng.choice((1, 1, 2))
        return artist.word_scene(rng, *size, count)
    plan = rng.choice(PLANS)
    if kind < mix.words + mix.both:
        scene = artist.shape_scene(rng, *size, rng.choice(("one", "few")))
        squeeze(rng, scene)
        return artist.write(rng, scene, 1)
    return artist.shape_scene(rng, *size, plan)


def squeeze(rng: random.Random, scene: Scene) -> None:
    """Make room above or below the shapes."""
    low, high = (0.0, 0.66) if rng.random() < 0.5 else (0.34, 1.0)
    for thing in scene.shapes:
        thing.y = low + thing.y * (high - low)
        thing.radius *= 0.66


def interview(rng: random.Random, scene: Scene, turns: int, which: str = "") -> list[Turn]:
    """Up to `turns` questions on one scene, none twice, some leaning on the one before."""
    asker = Interviewer(rng, scene, which)
    weights = [
        (asker.read, 7 if scene.lines else 0), (asker.shape, 3), (asker.color, 3.5),
        (asker.count, 3), (asker.where, 3), (asker.yes_no, 4), (asker.describe, 1.6),
        (asker.background, 0.5), (asker.size, 0.7),
    ]  # fmt: skip
    if not scene.shapes:
        weights = [(asker.read, 6), (asker.yes_no, 1), (asker.where, 0.6), (asker.color, 0.6),
                   (asker.background, 0.3), (asker.describe, 0.4)]  # fmt: skip
    makers = [maker for maker, _ in weights]
    shares = [share for _, share in weights]
    found: list[Turn] = []
    asked: set[tuple[str, str]] = set()
    for _ in range(turns * 3):
        context = asker.last, asker.last_task
        follows = found and not which and rng.random() < 0.22
        turn = asker.follow_up() if follows else None
        turn = turn or rng.choices(makers, shares)[0]()
        if turn is None or (turn.task, turn.answer) in asked:
            asker.last, asker.last_task = context
            continue
        asked.add((turn.task, turn.answer))
        found.append(turn)
        if len(found) == turns:
            break
    if not found:
        found = [asker.yes_text() or Turn("", "", "")]
    if rng.random() < 0.03:
        found.append(
            Turn(rng.choice(("Thanks!", "Thank you.", "thanks")), "You are welcome.", "thanks")
        )
    return found


def system_prompt(rng: random.Random) -> str | None:
    kind = rng.random()
    if kind < 0.62:
        return None
    if kind < 0.94:
        return rng.choice(SYSTEM_PROMPTS)
    words = [
        "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(2, 9)))
        for _ in range(rng.randint(3, 12))
    ]
    return " ".join(words).capitalize() + "."


def with_picture(rng: random.Random, text: str) -> str:
    kind = rng.random()
    if kind < 0.74:
        return IMAGE_MARK + text
    return IMAGE_MARK + "\n" + text if kind < 0.80 else text + IMAGE_MARK


def on_one_picture(rng: random.Random, artist: Artist, size: Size, mix: Mix) -> Conversation:
    scene = any_scene(rng, artist, size, mix)
    picture = paint(rng, artist, scene, size)
    turns = interview(rng, scene, rng.choice((1, 2, 3, 4, 5, 6)))
    if rng.random() < 0.012:
        turns.append(small_talk(rng, longest_count=25))
    turns[0].question = with_picture(rng, turns[0].question)
    return Conversation(turns, system_prompt(rng), [picture])


def on_groups(rng: random.Random, artist: Artist, size: Size) -> Conversation:
    """What a scene of two or three kinds of things shows, and how many there are of each."""
    described = rng.random() < 0.6
    for _ in range(8 if described else 1):
        scene = artist.shape_scene(rng, *size, rng.choice(("groups", "groups", "groups", "many")))
        if caption(scene):
            break
    picture = paint(rng, artist, scene, size)
    asker = Interviewer(rng, scene)
    found = [asker.describe()] if described else []
    found.extend(
        asker.count() if rng.random() < 0.8 else asker.yes_no()
        for _ in range(rng.choice((1, 2, 4, 5, 6)))
    )
    asked = {turn.question: turn for turn in found if turn}
    turns = list(asked.values()) or [asker.yes_text() or Turn("", "", "")]
    turns[0].question = with_picture(rng, turns[0].question)
    return Conversation(turns, system_prompt(rng), [picture])


def text_only(rng: random.Random) -> Conversation:
    turns = [small_talk(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    return Conversation(turns, system_prompt(rng), [])
