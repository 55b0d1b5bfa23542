"""Options of questions have the log probabilities that a prompt ending with each would have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.integration.decisions import OPTIONS, Asked, decide, decisions_of, logprobs_in_chunks
from tests.integration.harness import EngineHarness, Load, NewEngine, Part
from tests.support.images import random_image
from tests.support.selection import CORE_TEXTS
from vlm_server.protocol import Decision
from vlm_server.runner.prefill.branches import OptionScore, greedy_option

RTOL, ATOL = 1e-4, 1e-4
PARTS: tuple[Part, ...] = ("Look at this:", random_image(1))
QUESTION = Asked("Which colour is it?")


def check(engine: EngineHarness, name: str, parts: Sequence[Part], decision: Decision) -> None:
    """Compare a decision with the options as chunks of longer prompts."""
    prompt = engine.prompts[name]
    scores = []
    for option in prompt.options:
        tokens, end, best_end = logprobs_in_chunks(engine, parts, prompt, option)
        scores.append(OptionScore(tuple(tokens), end, best_end))
    expected = [scores[place].total for place in prompt.option_places]
    np.testing.assert_allclose(decision.logprobs, expected, rtol=RTOL, atol=ATOL)
    assert prompt.option_places[decision.greedy] == greedy_option(prompt.options, scores)


@pytest.mark.families("caches", "rope")
def test_options_have_logprobs_of_longer_prompts(new_engine: NewEngine) -> None:
    engine = new_engine(chunk_tokens=16)
    for name, parts in (("picture", PARTS), ("text", ("A red apple.",))):
        (decision,) = decisions_of(engine, decide(name, parts, QUESTION))
        check(engine, f"{name}/0", parts, decision)


@pytest.mark.parametrize("family", CORE_TEXTS)
def test_options_of_text_models_have_logprobs_of_longer_prompts(
    family: str, load_tiny: Load
) -> None:
    engine = EngineHarness(*load_tiny(family), chunk_tokens=16)
    (decision,) = decisions_of(engine, decide("text", ("A red apple.",), QUESTION))
    assert len(decision.logprobs) == len(OPTIONS)
    check(engine, "text/0", (), decision)
