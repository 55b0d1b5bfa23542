"""In every family, an answer does not depend on the requests that run beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx_vlm import stream_generate
from mlx_vlm.prompt_utils import apply_chat_template
from numpy.typing import NDArray

from tests.integration.harness import (
    GREEDY,
    EngineHarness,
    NewEngine,
    Part,
    Served,
    ask,
    by_own_template,
    caches_of,
    conversation,
    encode_works,
    for_mlx_vlm,
    prepare,
)
from tests.integration.prompts import LONGER, PROMPTS, prompt_request
from tests.support.active_memory import active_bytes
from tests.support.image_files import image_of, submitted
from tests.support.images import random_image
from tests.support.whole_run import few_of
from vlm_server.cache.caches import Caches
from vlm_server.cache.lru import LruCache
from vlm_server.engine.request.states import State
from vlm_server.errors import InternalError
from vlm_server.interfaces import EncodeWork, Prepared
from vlm_server.prompt.media.processing import Processed, process_image
from vlm_server.prompt.preparer import MultimodalPreparer
from vlm_server.prompt.tokenizer import PromptTokenizer
from vlm_server.protocol import Failed, Finished, SamplingParams
from vlm_server.runner.encode.encoder import ImageEncoder
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model import attention

ONE_IMAGE_IS_RIGHT = {
    "fastvlm": "mlx-vlm moves a token of text over each image after the first",
    "granite4_vision": "mlx-vlm gives all images the features of the first",
    "paligemma": "mlx-vlm takes one",
    "llava_next": "mlx-vlm refuses more",
    "step3p7": "mlx-vlm's processor refuses more",
}
"""Families that mlx-vlm's own generation can't show several images, and why."""

NOT_COUNTED = (
    "gemma4", "gemma4_unified", "granite4_vision", "jina_vlm", "kimi_vl", "minicpmo", "molmo",
    "paligemma"
)  # fmt: skip
"""Families in which an image with more tokens than features goes unnoticed."""


@pytest.fixture(scope="session")
def tokens_alone(answered: EngineHarness) -> Callable[[str], list[int]]:
    """The 24 tokens of a prompt that runs alone and is prefilled whole."""
    return lambda name: answered.tokens[name]


# ---- batched, chunked and cached answers equal those alone ---------------------------


def test_batched_answers_equal_answers_alone(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]]
):
    engine = new_engine()
    for name in PROMPTS:
        engine.add(prompt_request(name))
    engine.run()
    assert engine.tokens == {name: tokens_alone(name)[:10] for name in PROMPTS}


def test_staggered_answers_equal_answers_alone(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]]
):
    engine = new_engine()
    for number, name in enumerate(PROMPTS):
        engine.add(prompt_request(name, SamplingParams(max_tokens=6 + 4 * number, temperature=0.0)))
        engine.step(3 + number)
    engine.run()
    lengths = {name: 6 + 4 * number for number, name in enumerate(PROMPTS)}
    assert engine.tokens == {name: tokens_alone(name)[: lengths[name]] for name in PROMPTS}


def test_joining_request_changes_no_running_answer(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]]
):
    engine = new_engine(chunk_tokens=16)
    engine.add(prompt_request("long", LONGER))
    engine.add(prompt_request("image", LONGER))
    engine.step_until(lambda: len(engine.tokens.get("image", [])) >= 8)
    engine.add(prompt_request("images"))
    engine.run()
    assert engine.tokens["long"] == tokens_alone("long")
    assert engine.tokens["image"] == tokens_alone("image")
    assert engine.tokens["images"] == tokens_alone("images")[:10]


def test_rows_ending_in_any_order_leave_other_answers_unchanged(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]]
):
    lengths = dict(zip(PROMPTS, (5, 20, 1, 12, 9), strict=True))
    engine = new_engine()
    for name in PROMPTS:
        engine.add(prompt_request(name, SamplingParams(max_tokens=lengths[name], temperature=0.0)))
    engine.run()
    assert engine.tokens == {name: tokens_alone(name)[: lengths[name]] for name in PROMPTS}


@pytest.mark.families("caches", "prompts", "deepstack", "rope")
@pytest.mark.parametrize("chunk", few_of([7, 16], [7]))
def test_chunked_prefill_answers_equal_whole_prefill(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]], chunk: int
):
    engine = new_engine(chunk_tokens=chunk)
    for name in PROMPTS:
        engine.add(prompt_request(name))
    engine.run()
    assert engine.tokens == {name: tokens_alone(name)[:10] for name in PROMPTS}


@pytest.mark.families("caches")
@pytest.mark.parametrize("state", ["encoding", "prefill", "decode", "first token"])
def test_abort_leaves_other_answers_unchanged(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]], state: str
):
    engine = new_engine(chunk_tokens=9)
    engine.add(prompt_request("long", LONGER))
    engine.step_until(lambda: len(engine.tokens.get("long", [])) >= 3)
    engine.add(prompt_request("images"))
    engine.add(prompt_request("image"))
    engine.step()
    request = engine.scheduler._requests["images"]
    reached = {
        "encoding": lambda: request.state is State.ENCODING and request.is_begun,
        "prefill": lambda: request.num_prefilled > 0,
        "decode": lambda: request.usage.completion_tokens == 4,
        "first token": lambda: request.state is State.DECODE,
    }
    engine.step_until(reached[state])
    engine.abort("images")
    engine.run()
    assert engine.tokens["long"] == tokens_alone("long")
    assert engine.tokens["image"] == tokens_alone("image")[:10]
    ended = engine.ends["images"]
    assert isinstance(ended, Finished)
    assert ended.is_aborted


def test_broken_image_fails_only_its_request(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]]
):
    engine = new_engine()
    broken = image_of(b"\x89PNG\r\n\x1a\n nothing", "PNG", 8, 8)
    for name in ("text", "image"):
        engine.add(prompt_request(name))
    failed = engine.failure(ask("broken", broken, "what?"))
    assert failed.code == "invalid_image"
    assert engine.tokens == {name: tokens_alone(name)[:10] for name in ("text", "image")}


def test_failed_encode_fails_only_its_request(
    new_engine: NewEngine, served: Served, tokens_alone: Callable[[str], list[int]]
):
    """Pixels of a wrong shape fail in the tower; other answers are unchanged."""
    engine = new_engine()
    engine.add(prompt_request("text", LONGER))
    engine.step(4)
    add_changed(engine, served[1], with_pixels(lambda pixels: pixels.reshape(-1)[:7]))
    engine.run()
    failed = engine.ends["image"]
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    assert engine.tokens["text"] == tokens_alone("text")


@pytest.mark.families("caches", "batches")
def test_nan_logits_fail_only_their_request(
    new_engine: NewEngine, served: Served, tokens_alone: Callable[[str], list[int]]
):
    """NaN in an image's features comes out as NaN in the logits of every token after it."""

    def with_nans(made: Prepared) -> Prepared:
        work = EncodeWork("image", 0, made.prompt, made.inputs[0])
        (features,) = ImageEncoder(served[0]).encode([work])
        lease = LruCache[Any]("none", 0).put("", replace(features, rows=features.rows * mx.nan), 1)
        made.references.add_features(0, lease)
        return replace(made, inputs={})

    caches = caches_of(served, encoder_bytes=1 << 20)
    engine = new_engine(caches=caches)
    engine.add(prompt_request("text", LONGER))
    engine.add(prompt_request("images", LONGER))
    engine.step_until(lambda: len(engine.tokens.get("images", [])) >= 4)
    kept = caches.prefixes.stats().entries
    add_changed(engine, served[1], with_nans)
    engine.run()
    failed = engine.ends["image"]
    assert isinstance(failed, Failed)
    assert (failed.code, "NaN" in failed.message) == ("internal_error", True)
    assert "image" not in engine.tokens
    assert caches.prefixes.stats().entries <= kept + 2, "only the answers of the others are kept"
    assert engine.tokens == {name: tokens_alone(name) for name in ("text", "images")}


def test_nan_features_fail_their_request_and_are_not_cached(new_engine: NewEngine, served: Served):
    if served[0].family.name == "molmo2":
        pytest.skip("mlx-vlm replaces them by zeros")
    caches = Caches(encoder_bytes=1 << 20)
    engine = new_engine(caches=caches)
    add_changed(engine, served[1], with_pixels(lambda pixels: np.full_like(pixels, np.nan)))
    engine.run()
    failed = engine.ends["image"]
    assert isinstance(failed, Failed)
    assert (failed.code, "not finite" in failed.message) == ("internal_error", True)
    assert not caches.features.stats().entries


def test_images_processed_on_several_threads_equal_those_processed_alone(served: Served):
    spec = served[0].spec
    placeholder = PromptTokenizer(spec).template.placeholder
    images = [np.array(random_image(seed, 60 + 28 * (seed % 3))) for seed in range(6)]

    def processed(pixels: NDArray[np.uint8]) -> Processed:
        return process_image(spec, placeholder, pixels, "")

    alone = [processed(pixels) for pixels in images]
    with ThreadPoolExecutor(len(images)) as threads:
        together = list(threads.map(processed, images * 4))
    for number, result in enumerate(together):
        expected = alone[number % len(images)]
        assert result.layout.token_ids.tolist() == expected.layout.token_ids.tolist()
        for name, values in expected.inputs[0].items():
            assert np.array_equal(result.inputs[0][name], values, equal_nan=True)


def test_more_placeholders_than_features_fail_only_their_request(
    new_engine: NewEngine, served: Served, tokens_alone: Callable[[str], list[int]]
):
    """A processor that counts an image's tokens in another way than the model does."""
    if served[0].family.name in NOT_COUNTED:
        pytest.skip("mlx-vlm gives the tokens that are too many something else")
    image_token_id = served[0].spec.image_token_id

    def add_placeholder(prepared: Prepared) -> Prepared:
        (span,) = prepared.prompt.spans
        last = np.flatnonzero(prepared.prompt.token_ids == image_token_id)[-1]
        ids = np.insert(prepared.prompt.token_ids, last, image_token_id)
        longer = replace(span, end=span.end + 1)
        return replace(prepared, prompt=replace(prepared.prompt, token_ids=ids, spans=(longer,)))

    engine = new_engine()
    engine.add(prompt_request("text", LONGER))
    engine.step(4)
    add_changed(engine, served[1], add_placeholder)
    engine.run()
    failed = engine.ends["image"]
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    assert engine.tokens == {"text": tokens_alone("text")}


def test_encoder_with_too_many_feature_rows_is_error(served: Served):
    """LLaVA-NeXT's merge does: one placeholder becomes a whole tile."""
    (work,) = encode_works(served[1], prompt_request("image"))
    if served[0].family.tower is not None:
        pytest.skip("its images go through our tower alone")

    class Lengthening:
        language_model = served[0].language_model

        def get_input_embeddings(self, *args: Any, **kwargs: Any) -> Any:
            prepared = served[0].model.get_input_embeddings(*args, **kwargs)
            prepared.inputs_embeds = mx.concatenate([prepared.inputs_embeds] * 2, axis=1)
            return prepared

    with pytest.raises(InternalError, match="rows of features"):
        ImageEncoder(replace(served[0], model=Lengthening())).encode([work])


def with_pixels(change: Callable[[Any], Any]) -> Callable[[Prepared], Prepared]:
    """The prompt's only image with other pixel values than the processor made."""

    def changed(prepared: Prepared) -> Prepared:
        inputs = prepared.inputs[0]
        key = "pixel_bytes" if "pixel_bytes" in inputs else "pixel_values"
        return replace(
            prepared, inputs={0: {**inputs, key: change(inputs[key].astype(np.float32))}}
        )

    return changed


def add_changed(
    engine: EngineHarness,
    preparer: MultimodalPreparer,
    change: Callable[[Prepared], Prepared],
) -> None:
    """Add the request "image" with a changed preparer result."""
    engine.preparers.outcomes["image"] = change(prepare(preparer, prompt_request("image")))
    engine.add(prompt_request("image"))


# ---- images are looked at ----------------------------------------------------------


def test_different_images_get_different_answers(new_engine: NewEngine):
    engine = new_engine()
    first = engine.answer(ask("a", random_image(1), "what?"))
    assert engine.answer(ask("b", random_image(2), "what?")) != first
    assert engine.answer(ask("c", random_image(1), "what?")) == first


def test_answer_depends_on_order_of_images(new_engine: NewEngine):
    engine = new_engine()
    a, b = random_image(1), random_image(2)
    assert engine.answer(ask("ab", a, b, "what?")) != engine.answer(ask("ba", b, a, "what?"))


def test_answer_depends_on_images_position_in_text(new_engine: NewEngine, served: Served):
    if served[0].family.name in ("llava", "molmo", "paligemma"):
        pytest.skip("its template puts all pictures first")
    engine = new_engine()
    first = engine.answer(ask("before", random_image(1), "what is this"))
    assert engine.answer(ask("after", "what is this", random_image(1))) != first


@pytest.mark.families
def test_equal_pixels_in_other_format_get_equal_answer(new_engine: NewEngine):
    engine = new_engine()
    png = engine.answer(ask("png", submitted(random_image(1)), "what?"))
    webp = submitted(random_image(1), "WEBP", lossless=True)
    assert engine.answer(ask("webp", webp, "what?")) == png


SHAPES = [(1, 1), (1, 90), (90, 1), (3000, 10), (2, 500)]


@pytest.mark.parametrize(("width", "height"), few_of(SHAPES, [(1, 1), (3000, 10)]))
def test_odd_shapes_get_answer_or_clear_refusal(
    new_engine: NewEngine, tokens_alone: Callable[[str], list[int]], width: int, height: int
):
    engine = new_engine()
    engine.add(prompt_request("text"))
    engine.add(ask("odd", random_image(1, width, height), "what?"))
    engine.run()
    end = engine.ends["odd"]
    if isinstance(end, Failed):
        assert end.code == "invalid_image"
        assert f"{width}x{height}" in end.message
        assert end.param == "messages[0]"
    assert engine.tokens["text"] == tokens_alone("text")[:10]


# ---- the same as mlx-vlm -------------------------------------------------------------


def mlx_vlm_tokens(loaded: LoadedModel, *turns: tuple[str, tuple[Part, ...]]) -> list[int]:
    """mlx-vlm's own greedy tokens; a BOS that the template wrote is not added once more."""
    images: list[Any] = []
    messages = []
    for role, parts in turns:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in parts
        ]
        images += [part for part in parts if not isinstance(part, str)]
        messages.append({"role": role, "content": content})
    text = rendered(loaded, messages)
    with mlx_vlms_gated_delta():
        results = list(
            stream_generate(
                loaded.model,
                loaded.processor,
                for_mlx_vlm(loaded, text, has_images=bool(images)),
                image=images or None,
                max_tokens=24,
                temperature=0.0,
            )
        )
    return [int(result.token) for result in results][:24]  # the last comes twice


@contextmanager
def mlx_vlms_gated_delta() -> Iterator[None]:
    """Let hybrid models compute mlx-vlm's own rule, which `use_gated_delta` replaced."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), original in attention._RULES.items():
            patch.setattr(module, name, original)
        yield


def rendered(loaded: LoadedModel, messages: list[dict[str, Any]]) -> str:
    """The prompt rendered by mlx-vlm.

    Not for a family whose template takes texts only: mlx-vlm would put images first.
    """
    if image_text := loaded.family.image_text or loaded.family.placeholder:
        texts = [
            {
                "role": each["role"],
                "content": "".join(part.get("text", image_text) for part in each["content"]),
            }
            for each in messages
        ]
        made = loaded.processor.tokenizer.apply_chat_template(
            texts, tokenize=False, add_generation_prompt=True
        )
        return str(made)
    if loaded.family.chat_template:
        return by_own_template(loaded, messages)
    count = sum(part["type"] == "image" for each in messages for part in each["content"])
    made = apply_chat_template(loaded.processor, loaded.model.config, messages, num_images=count)
    return str(made)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_equal_mlx_vlms(
    mlx_vlms: LoadedModel, tokens_alone: Callable[[str], list[int]], name: str
):
    if name == "images" and (reason := ONE_IMAGE_IS_RIGHT.get(mlx_vlms.family.name)):
        pytest.skip(reason)
    assert tokens_alone(name) == mlx_vlm_tokens(mlx_vlms, ("user", PROMPTS[name]))


def test_large_image_tokens_equal_mlx_vlms(mlx_vlms: LoadedModel, new_engine: NewEngine):
    """Large images are cut or scaled where small ones are not."""
    parts = (random_image(1, 1000, 800), "What is this?")
    sampling = msgspec.structs.replace(GREEDY, max_tokens=24)
    ours = new_engine().answer(ask("large", *parts, sampling=sampling))
    assert ours == mlx_vlm_tokens(mlx_vlms, ("user", parts))


def test_conversation_tokens_equal_mlx_vlms(mlx_vlms: LoadedModel, new_engine: NewEngine):
    if reason := ONE_IMAGE_IS_RIGHT.get(mlx_vlms.family.name):
        pytest.skip(reason)
    turns: tuple[tuple[str, tuple[Part, ...]], ...] = (
        ("system", ("You look at screenshots.",)),
        ("user", (random_image(1), "What is this?")),
        ("assistant", ("A red square.",)),
        ("user", ("And this?", random_image(2, 60, 100))),
    )
    sampling = msgspec.structs.replace(GREEDY, max_tokens=24)
    ours = new_engine().answer(conversation("a", *turns, sampling=sampling))
    assert ours == mlx_vlm_tokens(mlx_vlms, *turns)


# ---- memory and references after the end ---------------------------------------------


@pytest.mark.families("caches", "tower")
def test_device_memory_returns_to_baseline_after_request_bursts(new_engine: NewEngine):
    engine = new_engine(chunk_tokens=32)
    burst = [*PROMPTS, "abort me"]

    def run_burst(number: int) -> None:
        for name in burst:
            parts = PROMPTS.get(name, PROMPTS["images"])
            engine.add(ask(f"{name} {number}", *parts))
        engine.step(6)
        engine.abort(f"abort me {number}")
        engine.run()

    run_burst(0)
    baseline = active_bytes()
    for number in range(1, 3):
        run_burst(number)
    assert active_bytes() <= baseline * 1.01
    assert engine.runner.num_tracked == 0
