"""Prompts of texts and pictures in any order, prepared with caches as the real preparer does."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from tests.unit.cache.prompts import Item, prompt_of
from tests.unit.engine.fakes import IMAGE_TOKEN, TOKENS_PER_IMAGE, refuse
from vlm_server.cache.caches import Caches
from vlm_server.ports import ImageSpan, PreparedPrompt
from vlm_server.protocol import Image, ImagePart, Message, SamplingParams, Submit, TextPart

Parts = tuple[str | int, ...]
"""Texts, and pictures by the number that says what they show."""


def num_tokens_of(parts: Parts) -> int:
    return sum(TOKENS_PER_IMAGE if isinstance(part, int) else len(part.encode()) for part in parts)


def submit_mixed(request_id: str, parts: Parts, salt: str, **sampling: object) -> Submit:
    """A user's message."""
    numbers = [part for part in parts if isinstance(part, int)]
    images = tuple(
        Image(b"", f"picture {number}", "PNG", 8, 8, "messages[0]") for number in numbers
    )
    places = iter(range(len(images)))
    content = tuple(
        TextPart(part) if isinstance(part, str) else ImagePart(next(places)) for part in parts
    )
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Submit(request_id, (Message("user", content),), images, params, cache_salt=salt)


Seen = Literal["before", "in media", "all"]
"""Which tokens the model's attend to: those before them, those of one picture too, or all."""


def prepare_mixed(
    submit: Submit, caches: Caches | None = None, seen: Seen = "before"
) -> PreparedPrompt:
    """What a preparer makes of `submit_mixed(...)` with these caches; raises like `refuse`.

    Without any, it has no images: it is what is asked, not what there is to do.
    """
    items: list[Item] = []
    for part in submit.messages[0].content:
        match part:
            case TextPart(text):
                refuse(text)
                items += text.encode()
            case ImagePart(index):
                key = f"{submit.images[index].mm_hash} {submit.cache_salt}"
                items.append((key, TOKENS_PER_IMAGE, IMAGE_TOKEN))
    elements = prompt_of(items)
    made = PreparedPrompt(elements.token_ids, spans=elements.spans, cache_salt=submit.cache_salt)
    return made if caches is None else _with_caches(_uncut(made, seen), caches)


def _uncut(made: PreparedPrompt, seen: Seen) -> PreparedPrompt:
    ends = {"before": 0, "in media": max((s.end for s in made.spans), default=0)}
    return replace(made, atomic_prefill_tokens=ends.get(seen, made.num_tokens))


def _with_caches(made: PreparedPrompt, caches: Caches) -> PreparedPrompt:
    last = made.num_tokens - 1
    if caches.prefixes.needs_snapshots:
        snapshot_points = {span.end for span in made.spans} | ({last} - {0})
        after = {border for border in snapshot_points if border >= made.atomic_prefill_tokens}
        made = replace(made, snapshot_points=tuple(sorted(after)))
    prefix = caches.prefixes.match(made.elements, last, made.cache_salt, made.atomic_prefill_tokens)
    images = []
    for span in made.spans:
        if span.start >= prefix.length:
            known = caches.features.lease(span.key)
            pixels = {} if known else {"pixel_values": np.zeros((1, 2), np.float32)}
            images.append(ImageSpan(span.start, span.end, span.key, pixels, known))
    return replace(made, images=tuple(images), prefix=prefix)
