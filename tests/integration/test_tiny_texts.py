"""Each text family's checkpoint loads offline, and answers by its prompt in words that vary.

Asks by mlx-vlm's own `stream_generate`, with which other tests compare the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm import load, stream_generate
from mlx_vlm.prompt_utils import apply_chat_template
from safetensors.numpy import load_file

from tests.support.selection import CORE_TEXTS
from tests.support.whole_run import few_of
from tests.tiny_models import FAMILIES, FIXED, TEXT_FAMILIES, WHOLE_PROMPTS, make
from tests.tiny_models.fixtures import TinyModel, tiny_model
from tests.tiny_models.text import WINDOW
from vlm_server.runner.families.table import row_of

__all__ = ["tiny_model"]

MAX_CHECKPOINT_BYTES = 3 * 1024**2
REPLY_TOKENS = 24
SHORT = "What changed?"
CHANGED = "What changes?"
LONG = "Read the number on the left of the red button, then click it. " * 4
"""More tokens than the windows are wide."""


@dataclass(frozen=True)
class Loaded:
    """One family's model, asked greedily."""

    family: str
    model: Any
    processor: Any

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    def prompt(self, content: str | Sequence[dict[str, str]]) -> str:
        messages = [{"role": "user", "content": content}]
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    def reply(self, text: str) -> list[int]:
        prompt = apply_chat_template(self.processor, self.model.config, text, num_images=0)
        steps = {"prefill_step_size": None} if self.family in WHOLE_PROMPTS else {}
        made = stream_generate(
            self.model, self.processor, prompt, max_tokens=REPLY_TOKENS, temperature=0.0, **steps
        )
        return [int(part.token) for part in made][:REPLY_TOKENS]  # the last repeats one


@pytest.fixture(params=few_of(TEXT_FAMILIES, CORE_TEXTS), scope="module")
def loaded(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Loaded:
    model, processor = load(str(tiny_model(request.param)))
    if request.param in FIXED:
        row = row_of({"model_type": request.param})
        assert row is not None
        assert row.fix is not None
        row.fix(model, processor, {})
    return Loaded(request.param, model, processor)


@pytest.fixture(scope="module")
def replies(loaded: Loaded) -> dict[str, list[int]]:
    return {text: loaded.reply(text) for text in (SHORT, CHANGED, LONG)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_text_families_have_names_of_their_own():
    assert not set(TEXT_FAMILIES) & set(FAMILIES)


def test_text_checkpoint_bytes_follow_from_its_seed(tiny_model: TinyModel, tmp_path: Path):
    first = contents(tiny_model("llama"))
    assert contents(make("llama", tmp_path / "again")) == first
    other = contents(make("llama", tmp_path / "other", seed=1))
    assert other.pop("model.safetensors") != first["model.safetensors"]
    assert other.items() <= first.items()


@pytest.mark.parametrize("family", few_of(TEXT_FAMILIES, CORE_TEXTS))
def test_text_checkpoint_is_small(family: str, tiny_model: TinyModel):
    assert sum(map(len, contents(tiny_model(family)).values())) <= MAX_CHECKPOINT_BYTES


@pytest.mark.parametrize("family", few_of(TEXT_FAMILIES, CORE_TEXTS))
def test_text_family_loads_weights_as_they_are_saved(family: str, tiny_model: TinyModel):
    saved = load_file(tiny_model(family) / "model.safetensors")
    held = dict(tree_flatten(load(str(tiny_model(family)))[0].parameters()))
    held |= {name.removeprefix("language_model."): array for name, array in held.items()}
    assert saved.keys() <= held.keys()
    assert all(np.array_equal(held[name], saved[name]) for name in saved)


def test_text_family_answers_prompt(loaded: Loaded, replies: dict[str, list[int]]):
    assert [len(reply) for reply in replies.values()] == [REPLY_TOKENS] * len(replies)
    specials = set(loaded.tokenizer.get_added_vocab().values())
    assert not specials & {token for reply in replies.values() for token in reply}


def test_text_family_varies_tokens_within_answer(replies: dict[str, list[int]]):
    assert all(np.bincount(reply).max() <= REPLY_TOKENS // 2 for reply in replies.values())


def test_text_family_answers_by_prompt(replies: dict[str, list[int]]):
    assert len({tuple(reply) for reply in replies.values()}) == len(replies)


def test_text_family_repeats_answer_to_long_prompt(loaded: Loaded, replies: dict[str, list[int]]):
    assert len(loaded.tokenizer.encode(LONG)) > WINDOW
    assert loaded.reply(LONG) == replies[LONG]


def test_text_template_joins_parts(loaded: Loaded):
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "changed?"}]
    joined = (
        "Whatchanged?" if loaded.family.startswith("gemma") else SHORT
    )  # Gemma's trims each part
    assert loaded.prompt(parts) == loaded.prompt(joined)
