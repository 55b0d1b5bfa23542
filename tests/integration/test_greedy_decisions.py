"""A trained model's greedy option is what it writes under a grammar of the options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vlm_server
from tests.integration.decisions import Asked, decide, decisions_of
from tests.integration.harness import EngineHarness, ask, caches_of, load_model, new_preparer
from tests.support.images import canvas, draw_shape
from vlm_server.protocol import SamplingParams

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "light blue", "r")
SHAPES = ("circle", "square", "triangle", "star")
QUESTIONS = (
    ("What colour is the circle?", COLOURS),
    ("What colour is the square?", COLOURS[::-1]),
    ("What shape is on the left?", SHAPES),
    ("How many circles are there?", ("0", "1", "2", "10", "12")),
    ("Is there a star?", ("yes", "no", "not at all")),
    ("Where is the square?", ("left", "right", "top left", "top right", "bottom")),
)


@pytest.fixture(scope="module")
def engine() -> EngineHarness:
    loaded = load_model(Path(vlm_server.__file__).parent / "models" / "demo")
    served = loaded, new_preparer(loaded)
    return EngineHarness(*served, caches=caches_of(served))


@pytest.mark.parametrize("seed", range(2))
def test_greedy_option_is_written_under_grammar_of_options(
    engine: EngineHarness, seed: int
) -> None:
    colours = ("red", "blue", "green", "black")
    picture = draw_shape(canvas(), "circle", colours[seed], (120, 200 + 20 * seed), 70)
    draw_shape(picture, "square", colours[seed + 1], (320, 240), 60)
    for number, (text, options) in enumerate(QUESTIONS):
        quoted = [json.dumps(option) for option in options]
        schema = json.dumps({"enum": list(options)})
        sampling = SamplingParams(max_tokens=40, temperature=0.0, json_schema=schema)
        name = f"{seed}-{number}"
        engine.answer(ask(f"written {name}", picture, text, sampling=sampling))
        (decision,) = decisions_of(engine, decide(name, (picture,), Asked(text, quoted)))
        written, asked = engine.prompts[f"written {name}"], engine.prompts[f"{name}/0"]
        assert written.token_ids.tolist() == asked.token_ids.tolist()
        assert quoted[decision.greedy] == engine.texts[f"written {name}"]
