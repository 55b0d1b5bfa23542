"""Each family's checkpoint builds the same twice, loads offline, and looks at its images.

Drives a model by the four calls that the runner is built on, and by nothing else of mlx-vlm's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm import load
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.prompt_utils import apply_chat_template
from mlx_vlm.utils import prepare_inputs, should_add_special_tokens
from PIL import Image

from tests.support.images import random_image
from tests.tiny_models import FAMILIES, LARGE, LONG_IMAGES, ONE_IMAGE, make
from tests.tiny_models.fixtures import TinyModel, tiny_model
from tests.tiny_models.llava import SPARE_ROWS
from vlm_server.runner.families import table
from vlm_server.runner.loading.checkpoint.files import image_settings

pytestmark = pytest.mark.families()

__all__ = ["tiny_model"]

MAX_CHECKPOINT_BYTES = 2 * 1024**2
LARGE_CHECKPOINT_BYTES = 16 << 20
MAX_IMAGE_TOKENS = 32
REPLY_TOKENS = 24
FEATURES_FOR_LANGUAGE = ("position_ids", "rope_deltas", "visual_pos_masks")


@dataclass(frozen=True)
class Loaded:
    """One family's model, and greedy decoding through the seam's calls."""

    model: Any
    processor: Any

    @cached_property
    def image_token_id(self) -> int:
        config = getattr(self.model, "thinker", self.model).config
        row = table.row_of({"model_type": config.model_type})
        if row is not None and row.image_token:
            return int(self.processor.tokenizer.convert_tokens_to_ids(row.image_token))
        found = getattr(config, "image_token_index", None)
        return int(config.image_token_id if found is None else found)

    def prepare(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        parts = [*[{"type": "image"}] * len(images), {"type": "text", "text": text}]
        messages = [{"role": "user", "content": parts}]
        config = self.model.config
        prompt = self._render(messages, len(images))
        return dict(
            prepare_inputs(
                self.processor,
                images=list(images) or None,
                prompts=prompt,
                image_token_index=self.image_token_id,
                add_special_tokens=should_add_special_tokens(config.model_type, self.processor),
            )
        )

    def _render(self, messages: list[dict[str, Any]], num_images: int) -> str:
        config = self.model.config
        row = table.row_of({"model_type": config.model_type})
        if row is not None and row.chat_template:
            return str(
                self.processor.tokenizer.apply_chat_template(
                    messages,
                    chat_template=row.chat_template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        return str(apply_chat_template(self.processor, config, messages, num_images=num_images))

    def reply(self, text: str, images: Sequence[Image.Image] = ()) -> tuple[list[int], mx.array]:
        """Greedy token ids, and the logits that chose them: (tokens, vocabulary)."""
        inputs = self.prepare(text, images)
        ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
        language = self.model.language_model
        features = self.model.get_input_embeddings(
            ids, inputs.pop("pixel_values", None), mask=mask, **inputs
        ).to_dict()
        extras = {k: features[k] for k in FEATURES_FOR_LANGUAGE if features[k] is not None}
        if features["deepstack_visual_embeds"] is not None:
            extras["deepstack_visual_embeds"] = features["deepstack_visual_embeds"]
        cache = make_prompt_cache(language)
        out = language(ids, inputs_embeds=features["inputs_embeds"], cache=cache, **extras)
        deltas = {"rope_deltas": extras["rope_deltas"]} if "rope_deltas" in extras else {}
        logits = [out.logits[:, -1]]
        tokens = [int(mx.argmax(logits[-1]).item())]
        while len(tokens) < REPLY_TOKENS:
            out = language(mx.array([tokens[-1:]]), cache=cache, **deltas)
            logits.append(out.logits[:, -1])
            tokens.append(int(mx.argmax(logits[-1]).item()))
        return tokens, mx.concatenate(logits)


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(family: str, tiny_model: TinyModel) -> Loaded:
    model, processor = load(str(tiny_model(family)))
    if fix := table.FAMILIES[family].fix:
        fix(model, processor, image_settings(tiny_model(family)))
    return Loaded(model, processor)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_tiny_checkpoint_bytes_follow_from_its_seed(
    family: str, tiny_model: TinyModel, tmp_path: Path
):
    first = contents(tiny_model(family))
    assert contents(make(family, tmp_path / "again")) == first
    other = contents(make(family, tmp_path / "other", seed=1))
    assert other.pop("model.safetensors") != first["model.safetensors"]
    assert other.items() <= first.items()


def test_tiny_checkpoint_is_small(family: str, tiny_model: TinyModel):
    most = LARGE_CHECKPOINT_BYTES if family in LARGE else MAX_CHECKPOINT_BYTES
    assert sum(map(len, contents(tiny_model(family)).values())) <= most


def test_tiny_model_vocabulary_equals_its_tokenizers(loaded: Loaded):
    embeddings = _embeddings(loaded.model.language_model)
    spare = SPARE_ROWS if loaded.model.config.model_type == "llava_qwen2" else 0
    assert embeddings.shape[0] == len(loaded.processor.tokenizer) + spare
    assert embeddings.dtype == mx.float32


def _embeddings(language_model: Any) -> mx.array:
    """Of all tokens, in one table or in two."""
    tables = (dict(module) for _, module in language_model.named_modules())
    (two,) = [each for each in tables if "new_embedding" in each] or [None]
    if two is not None:
        return mx.concatenate([two["embedding"], two["new_embedding"]])
    names = ("embed_tokens.weight", "backbone.embeddings.weight")
    parameters = tree_flatten(language_model.parameters())
    (table,) = [array for name, array in parameters if name.endswith(names)]
    return table


def test_tiny_model_reply_to_text_is_varied_and_endless(loaded: Loaded):
    tokens, logits = loaded.reply("What changed?")
    assert bool(mx.all(mx.isfinite(logits)).item())
    if loaded.model.config.model_type != "gemma3n":  # stuck after this text, not after others
        assert np.bincount(tokens).max() <= REPLY_TOKENS // 2
    assert not set(tokens) & set(loaded.processor.tokenizer.get_added_vocab().values())


def test_tiny_model_reply_survives_tokenizer(loaded: Loaded):
    tokens, _ = loaded.reply("What changed?")
    tokenizer = loaded.processor.tokenizer
    text = tokenizer.decode(tokens)
    again = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(again) == text


@pytest.mark.parametrize("count", [1, 2])
def test_tiny_model_reply_depends_on_images(loaded: Loaded, count: int):
    if loaded.model.config.model_type in ONE_IMAGE and count > 1:
        pytest.skip("mlx-vlm can't show it several images")
    alike = [random_image(number) for number in range(count - 1)]
    first, first_logits = loaded.reply("What changed?", [*alike, random_image(7)])
    second, _ = loaded.reply("What changed?", [*alike, random_image(8)])
    assert bool(mx.all(mx.isfinite(first_logits)).item())
    assert first != second
    assert loaded.reply("What changed?", [*alike, random_image(7)])[0] == first


@pytest.mark.parametrize("size", [(64, 64), (112, 84), (70, 112)])
def test_tiny_models_use_few_tokens_per_image(loaded: Loaded, size: tuple[int, int]):
    if loaded.model.config.model_type in LONG_IMAGES:
        pytest.skip("mlx-vlm's processor takes no other number")
    ids = loaded.prepare("What changed?", [random_image(1, *size)])["input_ids"]
    count = int(mx.sum(ids == loaded.image_token_id).item())
    assert 1 <= count <= MAX_IMAGE_TOKENS
