"""Prompts that engines are asked in many tests, and how they are asked."""

from __future__ import annotations

from tests.integration.harness import GREEDY, EngineHarness, Part, ask
from tests.support.images import random_image
from vlm_server.protocol import SamplingParams, Submit

PROMPTS: dict[str, tuple[Part, ...]] = {
    "text": ("Which colour is the shape on the left?",),
    "long": ("Look at the second button" + ", and read the number" * 6,),
    "image": (random_image(1), "Describe this image."),
    "images": ("First", random_image(2, 100, 60), "and then", random_image(3), "which one?"),
    "mute": (random_image(4, 60, 120),),
}
LONGER = SamplingParams(max_tokens=24, temperature=0.0)

_IN_PAIRS: tuple[tuple[Part, ...], ...] = (
    ("Hi",),
    PROMPTS["long"],
    PROMPTS["image"],
    (random_image(1), "Describe this picture, please."),
    PROMPTS["images"],
)
_SHORT = SamplingParams(max_tokens=8, temperature=0.0)


def prompt_request(name: str, sampling: SamplingParams = GREEDY) -> Submit:
    return ask(name, *PROMPTS[name], sampling=sampling)


def answer_in_pairs(engine: EngineHarness) -> list[list[int]]:
    """Answers to five prompts, two at once. Two of them begin with the same image."""
    requests = [ask(f"{i}", *parts, sampling=_SHORT) for i, parts in enumerate(_IN_PAIRS)]
    for first, second in zip(requests[::2], [*requests[1::2], None], strict=True):
        engine.add(first)
        engine.step(2)
        if second:
            engine.add(second)
        engine.run()
    return [engine.tokens[request.request_id] for request in requests]
