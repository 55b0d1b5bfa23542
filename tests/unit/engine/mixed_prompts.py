"""Prompts of texts and images in any order, prepared with caches as the real preparer does."""

from __future__ import annotations

from typing import Literal

from tests.unit.cache.prompts import Item, prompt_of
from tests.unit.engine.fakes import IMAGE_TOKEN, TOKENS_PER_IMAGE, prepared, refuse
from vlm_server.cache.caches import Caches
from vlm_server.interfaces import Prepared, PreparedPrompt
from vlm_server.protocol import Image, ImagePart, Message, SamplingParams, Submit, TextPart

Parts = tuple[str | int, ...]
"""Texts, and images by the number that says what they show."""


def num_tokens_of(parts: Parts) -> int:
    return sum(TOKENS_PER_IMAGE if isinstance(part, int) else len(part.encode()) for part in parts)


def submit_mixed(request_id: str, parts: Parts, salt: str, **sampling: object) -> Submit:
    """A user's message."""
    numbers = [part for part in parts if isinstance(part, int)]
    images = tuple(Image(b"", f"image {number}", "PNG", 8, 8, "messages[0]") for number in numbers)
    places = iter(range(len(images)))
    content = tuple(
        TextPart(part) if isinstance(part, str) else ImagePart(next(places)) for part in parts
    )
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Submit(request_id, (Message("user", content),), images, params, cache_salt=salt)


Attention = Literal["before", "in media", "all"]
"""Which tokens the model's attend to: those before them, those of one image too, or all."""


def prompt_mixed(
    submit: Submit, attention: Attention = "before", *, has_snapshots: bool = False
) -> PreparedPrompt:
    """The prompt of `submit_mixed(...)`; raises like `refuse`."""
    items: list[Item] = []
    for part in submit.messages[0].content:
        match part:
            case TextPart(text):
                refuse(text)
                items += text.encode()
            case ImagePart(index):
                key = f"{submit.images[index].content_hash} {submit.cache_salt}"
                items.append((key, TOKENS_PER_IMAGE, IMAGE_TOKEN))
    key = prompt_of(items)
    num_tokens, last = len(key), len(key) - 1
    ends = {"before": 0, "in media": max((s.end for s in key.spans), default=0)}
    atomic = ends.get(attention, num_tokens)
    points = ({span.end for span in key.spans} | ({last} - {0})) if has_snapshots else set[int]()
    snapshot_points = tuple(sorted(point for point in points if point >= atomic))
    return PreparedPrompt(
        key.token_ids,
        key.spans,
        snapshot_points=snapshot_points,
        chunk_ends=snapshot_points if num_tokens % 2 else (),
        atomic_prefill_tokens=atomic,
        cache_salt=submit.cache_salt,
    )


def prepare_mixed(submit: Submit, caches: Caches, attention: Attention) -> Prepared:
    """The prepared prompt of `submit_mixed(...)` with these caches; raises like `refuse`."""
    has_snapshots = caches.prefixes.needs_snapshots
    return prepared(prompt_mixed(submit, attention, has_snapshots=has_snapshots), caches)
