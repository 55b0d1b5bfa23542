"""Every model that scores documents gives mlx-vlm's scores, alone and among others."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx_vlm
import numpy as np
import pytest
from mlx_vlm.reranker_loader import load_reranker
from mlx_vlm.server import reranking

from tests.integration.embeddings import embed, vectors_of
from tests.integration.harness import (
    EngineHarness,
    Load,
    Part,
    Served,
    ask,
    cached_tokens,
    caches_of,
)
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.tiny_models import JUDGING_FAMILIES, RERANKING_FAMILIES, cached
from vlm_server.engine.scheduler.pooling_groups import similarity
from vlm_server.protocol import Pooling, SamplingParams

RTOL, ATOL = 1e-4, 1e-5
QUERY = "Which fox jumps?"
DOCUMENTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Nothing of the kind.",
    "A long text about other things, and then some. " * 8,
)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def scores_of(engine: EngineHarness, name: str, *inputs: tuple[Part, ...]) -> list[float]:
    end = engine.finish(embed(name, *inputs, pooling=Pooling("score")))
    assert not end.vectors
    return list(end.scores)


def texts(*more: str) -> list[tuple[Part, ...]]:
    return [(QUERY,), *((text,) for text in (*DOCUMENTS, *more))]


# ---- classifiers of pairs ----------------------------------------------------------------


@pytest.fixture(scope="module", params=RERANKING_FAMILIES)
def classifier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_scores_of_pairs_are_mlx_vlms(classifier: str, load_tiny: Load) -> None:
    model, processor = load_reranker(cached(classifier))
    model.set_dtype(mx.float32)
    query = reranking.RerankItem(text=QUERY)
    expected = [
        reranking._score_sequence_batch(
            model, processor, model.config, query, [reranking.RerankItem(text=text)]
        )[0][0]
        for text in DOCUMENTS
    ]
    engine = EngineHarness(*load_tiny(classifier))
    np.testing.assert_allclose(scores_of(engine, "a", *texts()), expected, rtol=RTOL, atol=ATOL)
    assert len({round(score, 5) for score in expected}) == len(expected)


def test_classifier_makes_no_vectors(classifier: str, load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny(classifier))
    for submit in (embed("v", ("hi",)), ask("c", "hi")):
        assert engine.failure(submit).param == "model"


# ---- models that are asked for yes or no -------------------------------------------------


@pytest.fixture(scope="module", params=JUDGING_FAMILIES)
def judge(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def judges(judge: str, load_tiny: Load) -> Served:
    return load_tiny(judge)


@pytest.fixture(scope="module")
def inputs(judges: Served) -> list[tuple[Part, ...]]:
    if not judges[0].spec.reads_images:
        return texts()
    picture = random_image(3, 96, 64)
    return [*texts(), (picture,), ("Look:", picture, "a fox?")]


@pytest.fixture(scope="module")
def alone(judges: Served, inputs: list[tuple[Part, ...]]) -> list[float]:
    engine = EngineHarness(*judges)
    query, *documents = inputs
    return [scores_of(engine, str(i), query, each)[0] for i, each in enumerate(documents)]


@cache
def mlx_vlms(name: str) -> tuple[Any, Any]:
    model, processor = mlx_vlm.load(str(cached(name)))
    model.set_dtype(mx.float32)
    return model, processor


def test_judgements_are_mlx_vlms(
    judge: str, judges: Served, inputs: list[tuple[Part, ...]], alone: list[float]
) -> None:
    """Of the same prompts, by one call of its model without a cache."""
    model, processor = mlx_vlms(judge)
    spec = judges[0].spec
    if spec.reads_images:
        query = reranking.RerankItem(text=QUERY)
        documents = [reranking.RerankItem(text=text) for text in DOCUMENTS]
        expected, _ = reranking._score_vl_batch(
            model, processor, query, documents, reranking.DEFAULT_INSTRUCTION
        )
    else:
        engine = EngineHarness(*judges)
        scores_of(engine, "prompts", *inputs)
        prompts = [engine.prompts[f"prompts/{i}"].token_ids for i in range(1, len(inputs))]
        expected = [_text_score(model, processor, mx.array(ids)[None]) for ids in prompts]
        rendered = spec.tokenizer.decode(prompts[1])
        assert f"<Query>: {QUERY}\n<Document>: {DOCUMENTS[1]}<|im_end|>" in rendered
    np.testing.assert_allclose(alone[: len(expected)], expected, rtol=RTOL, atol=ATOL)
    assert len({round(score, 5) for score in alone}) == len(alone)


def _text_score(model: Any, processor: Any, token_ids: mx.array) -> float:
    states = model.language_model.model(token_ids)
    mask = mx.ones_like(token_ids)
    (score,) = reranking._binary_scores(model, states, mask, reranking._tokenizer(processor))
    return float(score)


def test_judgements_are_equal_in_chunks_beside_answers_and_cached(
    judges: Served, inputs: list[tuple[Part, ...]], alone: list[float]
) -> None:
    answering = EngineHarness(*judges)
    expected_tokens = answering.answer(ask("answer", "Hello", sampling=GREEDY))
    engine = EngineHarness(*judges, chunk_tokens=16, caches=caches_of(judges))
    engine.add(ask("answer", "Hello", sampling=GREEDY))
    engine.step(4)
    scores = scores_of(engine, "first", *inputs)
    np.testing.assert_allclose(scores, alone, rtol=RTOL, atol=ATOL)
    assert engine.tokens["answer"] == expected_tokens
    again = scores_of(engine, "again", *inputs)
    np.testing.assert_allclose(again, scores, rtol=0, atol=0)
    assert cached_tokens(engine, "again") == engine.ends["again"].usage.prompt_tokens
    later = scores_of(engine, "later", inputs[0], ("Another document.",))
    assert 0 < cached_tokens(engine, "later") < engine.ends["later"].usage.prompt_tokens
    fresh = scores_of(EngineHarness(*judges), "fresh", inputs[0], ("Another document.",))
    np.testing.assert_allclose(later, fresh, rtol=RTOL, atol=ATOL)
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0


def test_abort_between_chunks_leaves_no_prompt(
    judges: Served, inputs: list[tuple[Part, ...]]
) -> None:
    for num_steps in range(2, 6):
        engine = EngineHarness(*judges, chunk_tokens=16, caches=caches_of(judges))
        engine.add(embed("aborted", *inputs, pooling=Pooling("score")))
        engine.step(num_steps)
        engine.abort("aborted")
        engine.run()
        assert engine.ends["aborted"].is_aborted
        assert engine.caches.num_references == 0


def test_judge_makes_no_vectors(judges: Served) -> None:
    engine = EngineHarness(*judges)
    end = engine.failure(embed("v", ("hi",)))
    assert "no vectors" in end.message


# ---- models with vectors -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_vl_embedding", "colqwen2_5", "qwen3_embedding"])
def test_scores_are_products_of_vectors(name: str, load_tiny: Load) -> None:
    served = load_tiny(name)
    engine = EngineHarness(*served)
    inputs: list[tuple[Part, ...]] = texts()
    if served[0].spec.reads_images:
        inputs.append((random_image(3, 96, 64),))
    query = vectors_of(engine, embed("q", inputs[0], pooling=Pooling(input_type="query")))[0]
    documents = vectors_of(engine, embed("d", *inputs[1:], pooling=Pooling(input_type="document")))
    expected = [similarity(query, each) for each in documents]
    scores = scores_of(engine, "s", *inputs)
    np.testing.assert_allclose(scores, expected, rtol=RTOL, atol=1e-5 * len(query))
    best = [sum(max(float(q @ d) for d in each) for q in query) for each in documents]
    np.testing.assert_allclose(scores, best, rtol=RTOL, atol=1e-5 * len(query))


def test_model_that_is_no_judge_refuses_documents(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("gemma3"))
    end = engine.failure(embed("s", ("query",), ("document",), pooling=Pooling("score")))
    assert (end.code, end.param) == ("invalid_value", "model")
    assert "embedding" in end.message
