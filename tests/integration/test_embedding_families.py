"""Every embedding family makes mlx-vlm's vectors, whatever shares its batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.embeddings import (
    Rows,
    embed,
    mlx_vlms,
    mlx_vlms_vectors,
    vectors_of,
)
from tests.integration.harness import (
    EngineHarness,
    Load,
    Part,
    Served,
    ask,
    caches_of,
    prepare,
    video_of,
)
from tests.support import video_files
from tests.support.active_memory import active_bytes
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from tests.tiny_models import EMBEDDING_FAMILIES, RERANKING_FAMILIES
from vlm_server.interfaces import Prepared
from vlm_server.protocol import Finished, Pooling, Submit, Video
from vlm_server.runner.families.table import FAMILIES

RTOL, ATOL = 1e-4, 1e-5
"""Rounding in float32: vectors have length one, and most numbers are of size 0.1."""
TEXTS: tuple[tuple[Part, ...], ...] = (
    ("Hello there",),
    ("What is the capital of France, and why?",),
    ("The quick brown fox jumps over the lazy dog and runs away. " * 6,),
    ("Which fox?",),
)


@pytest.fixture(scope="module", params=EMBEDDING_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def served(family: str, load_tiny: Load) -> Served:
    return load_tiny(family)


@pytest.fixture(scope="module")
def inputs(served: Served) -> tuple[tuple[Part, ...], ...]:
    """Inputs of each kind that the family reads, of several lengths."""
    if not served[0].spec.reads_images:
        return TEXTS
    small, large = random_image(1, 64, 96), random_image(2, 200, 140)
    media: list[tuple[Part, ...]] = [(small,), (large, "A caption of it")]
    if served[0].spec.video_token_id is not None:
        clip = video_of(video_files.encode(video_files.noise(1, 7), fps=2))
        media.append((clip, "and its caption"))
    return (*TEXTS, *media, ("Before and", small, "after it", large))


@pytest.fixture(scope="module")
def alone(served: Served, inputs: tuple[tuple[Part, ...], ...]) -> list[Rows]:
    """The vectors of each input as the only one of a request, without caches."""
    engine = EngineHarness(*served)
    return [vectors_of(engine, embed(str(number), parts))[0] for number, parts in enumerate(inputs)]


def assert_close(rows: Rows, expected: Rows) -> None:
    assert rows.shape == expected.shape
    np.testing.assert_allclose(rows, expected, rtol=RTOL, atol=ATOL)


def test_vectors_are_mlx_vlms(
    family: str, served: Served, inputs: tuple[tuple[Part, ...], ...], alone: list[Rows]
) -> None:
    """mlx-vlm's own module takes no videos."""
    model, preparer = mlx_vlms(family, served[0])
    for parts, rows in zip(inputs, alone, strict=True):
        if any(isinstance(part, Video) for part in parts):
            continue
        prepared = prepare(preparer, _only_input(embed("x", parts)))
        prepared.references.release()
        assert_close(rows, mlx_vlms_vectors(model, prepared.prompt, joined(prepared)))


def test_vectors_have_length_one_and_differ(alone: list[Rows]) -> None:
    for rows in alone:
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-5)
    means = [rows.mean(axis=0) for rows in alone]
    assert all(
        np.abs(one - other).max() > 1e-3 for i, one in enumerate(means) for other in means[:i]
    )


def test_batch_equals_inputs_alone(
    served: Served, inputs: tuple[tuple[Part, ...], ...], alone: list[Rows]
) -> None:
    engine = EngineHarness(*served, chunk_tokens=2048)
    engine.add(embed("first", *inputs))
    engine.add(embed("second", *reversed(inputs)))
    engine.run()
    for name, expected in (("first", alone), ("second", alone[::-1])):
        end = engine.ends[name]
        assert isinstance(end, Finished), end
        for each, rows in zip(end.vectors, expected, strict=True):
            assert_close(np.frombuffer(each.data, "<f4").reshape(-1, each.dimensions), rows)


def test_cached_vectors_are_equal_bits(
    served: Served, inputs: tuple[tuple[Part, ...], ...]
) -> None:
    engine = EngineHarness(*served, caches=caches_of(served))
    first = vectors_of(engine, embed("first", *inputs))
    (hits,) = [cache for cache in engine.caches.stats() if cache.name == "vector"]
    assert hits.hits == 0
    second = vectors_of(engine, embed("second", *inputs))
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    (hits,) = [cache for cache in engine.caches.stats() if cache.name == "vector"]
    assert hits.hits == len(inputs)
    usage = engine.ends["second"].usage
    assert usage.cached_tokens == usage.prompt_tokens == engine.ends["first"].usage.prompt_tokens
    check_integrity(engine.caches)
    assert engine.caches.num_references == 0


def test_fewer_dimensions_are_first_ones(
    served: Served, inputs: tuple[tuple[Part, ...], ...], alone: list[Rows]
) -> None:
    engine = EngineHarness(*served)
    cut = vectors_of(engine, embed("cut", *inputs, pooling=Pooling(dimensions=8)))
    for rows, whole in zip(cut, alone, strict=True):
        first = whole[:, :8]
        assert_close(rows, first / np.linalg.norm(first, axis=1, keepdims=True))


def test_aborted_input_leaves_no_memory(
    served: Served, inputs: tuple[tuple[Part, ...], ...]
) -> None:
    engine = EngineHarness(*served)
    vectors_of(engine, embed("before", *inputs))
    before = active_bytes()
    engine.add(embed("aborted", *inputs))
    engine.step(2)
    engine.abort("aborted")
    engine.run()
    end = engine.ends["aborted"]
    assert isinstance(end, Finished)
    assert end.is_aborted
    assert active_bytes() == before


def test_chat_is_refused_by_name(served: Served, family: str) -> None:
    engine = EngineHarness(*served)
    end = engine.failure(ask("chat", "Hello"))
    assert (end.code, end.param) == ("invalid_value", "model")
    assert served[0].family.name in end.message
    assert "/v1/embeddings" in end.message


def test_embedding_families_have_tiny_checkpoints() -> None:
    names = {family.name for family in FAMILIES.values() if family.embeds is not None}
    assert names == {*EMBEDDING_FAMILIES, *RERANKING_FAMILIES}


def _only_input(submit: Submit) -> Submit:
    """A request with one input, as the scheduler passes it on."""
    from vlm_server.engine.scheduler.pooling_groups import PoolingGroups

    groups = PoolingGroups(lambda: 0.0, is_multi=False, of_pairs=False)
    groups.open(submit)
    (part,) = groups.next_inputs(submit.request_id)
    return part


def joined(prepared: Prepared) -> dict[str, NDArray[Any]]:
    """The inputs of all media of a prompt, as mlx-vlm's processor would join them."""
    items: list[Mapping[str, NDArray[Any]]] = [
        inputs for _, inputs in sorted(prepared.inputs.items())
    ]
    return {
        name: np.concatenate([inputs[name] for inputs in items])
        for name in (items[0] if items else ())
    }
