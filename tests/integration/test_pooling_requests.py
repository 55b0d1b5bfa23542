"""Requests for vectors of many inputs: shared batches, and one end whatever happens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from tests.integration.embeddings import embed, rows_of, vectors_of
from tests.integration.harness import EngineHarness, Load, caches_of
from tests.support.images import random_image
from tests.support.integrity import check_integrity
from vlm_server.interfaces import NewRequest
from vlm_server.protocol import Deadlines, Failed, Finished, Pooling, PoolingInput, Submit
from vlm_server.runner.embedding_runner import EmbeddingRunner
from vlm_server.runner.loaded import LoadedModel

FAMILY = "bert"
WORDS = ("One", "or two", "words", "of it")


def texts(count: int) -> list[tuple[str]]:
    return [(f"{WORDS[i % 4]} {i}",) for i in range(count)]


def ids(request_id: str, *prompts: tuple[int, ...]) -> Submit:
    inputs = [PoolingInput(prompt=each, param=f"input[{i}]") for i, each in enumerate(prompts)]
    return structs.replace(embed(request_id), inputs=tuple(inputs))


class RecordingEmbedder(EmbeddingRunner):
    """Notes the batches, and fails those of several inputs as often as a test says."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.batches: list[list[str]] = []
        self.tokens: list[int] = []
        self.num_failures = 0

    def _launch(self, requests: Sequence[NewRequest]) -> mx.array:
        self.batches.append([request.request_id for request in requests])
        longest = max(request.prompt.num_tokens for request in requests)
        self.tokens.append(longest * len(requests))
        if self.num_failures and len(requests) > 1:
            self.num_failures -= 1
            raise RuntimeError("a kernel failed")
        return super()._launch(requests)


@pytest.fixture
def engine(load_tiny: Load) -> EngineHarness:
    made = EngineHarness(*load_tiny(FAMILY), chunk_tokens=128)
    made.runner = made.loop.runner = RecordingEmbedder(made.loaded)
    return made


def finished(engine: EngineHarness, request_id: str) -> Finished:
    end = engine.ends[request_id]
    assert isinstance(end, Finished), end
    return end


def test_request_with_many_inputs_ends_once_in_their_order(engine: EngineHarness) -> None:
    inputs = texts(300)
    rows = vectors_of(engine, embed("many", *inputs))
    assert len(rows) == 300
    alone = vectors_of(engine, embed("alone", inputs[299]))[0]
    np.testing.assert_allclose(rows[299], alone, rtol=1e-4, atol=1e-5)
    assert engine.ends["many"].usage.prompt_tokens == sum(
        engine.prompts[f"many/{i}"].num_tokens for i in range(300)
    )


def test_batches_are_shared_and_bounded(engine: EngineHarness) -> None:
    engine.add(embed("a", *texts(20)))
    engine.add(embed("b", *texts(20)))
    engine.run()
    shared = [batch for batch in engine.runner.batches if len({i[0] for i in batch}) == 2]
    assert shared, engine.runner.batches
    assert len(engine.runner.batches) < 20
    assert max(engine.runner.tokens) <= 128


def test_input_longer_than_bound_is_embedded_alone(engine: EngineHarness) -> None:
    engine.add(embed("long", ("A long text. " * 60,), ("Short",)))
    engine.run()
    assert len(finished(engine, "long").vectors) == 2
    assert max(engine.runner.tokens) > 128
    assert ["long/0"] in engine.runner.batches


def test_invalid_input_ends_its_request_alone(engine: EngineHarness) -> None:
    engine.add(ids("bad", (5, 6), (7, 10**6), (8,)))
    engine.add(embed("good", *texts(5)))
    engine.run()
    end = engine.ends["bad"]
    assert isinstance(end, Failed)
    assert (end.code, end.param) == ("invalid_value", "input[1]")
    assert len(finished(engine, "good").vectors) == 5


def test_input_beyond_context_is_refused_by_number(engine: EngineHarness) -> None:
    end = engine.failure(embed("long", ("Short",), ("word " * 3000,)))
    assert end.code == "context_length_exceeded"
    assert "2048" in end.message
    most = vectors_of(engine, ids("most", tuple([5] * 2048)))
    assert np.isfinite(most[0]).all()


def test_failed_batch_is_embedded_one_by_one(engine: EngineHarness) -> None:
    expected = vectors_of(engine, embed("before", *texts(6)))
    engine.runner.num_failures = 1
    rows = vectors_of(engine, embed("after", *texts(6)))
    for one, other in zip(rows, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert engine.runner.num_failures == 0


def test_abort_ends_request_once_in_any_state(load_tiny: Load) -> None:
    served = load_tiny("qwen3_vl_embedding")
    inputs = [("text",), (random_image(1),), (random_image(2), "text"), *texts(150)]
    for num_steps in range(8):
        engine = EngineHarness(*served, caches=caches_of(served), chunk_tokens=64)
        engine.add(embed("aborted", *inputs))
        engine.step(num_steps)
        engine.abort("aborted")
        engine.abort("aborted")
        engine.run()
        assert finished(engine, "aborted").is_aborted
        check_integrity(engine.caches)
        assert engine.caches.num_references == 0


def test_missed_deadline_ends_request_once(engine: EngineHarness) -> None:
    late = structs.replace(embed("late", *texts(9)), deadlines=Deadlines(total_timeout_seconds=0.0))
    end = engine.failure(late)
    assert end.code == "total_timeout"


def test_equal_inputs_get_equal_bits(load_tiny: Load) -> None:
    """Whichever batch was stored first."""
    served = load_tiny(FAMILY)
    engine = EngineHarness(*served, caches=caches_of(served))
    engine.add(embed("a", *texts(10), *texts(10)))
    engine.add(embed("b", *texts(10)))
    engine.run()
    rows = [each.data for name in "ab" for each in finished(engine, name).vectors]
    assert rows[:10] == rows[10:20] == rows[20:]


def test_vector_cache_is_bounded_and_separates_salts(load_tiny: Load) -> None:
    served = load_tiny(FAMILY)
    size = 64 * 4
    engine = EngineHarness(*served, caches=caches_of(served, vector_bytes=3 * size))
    vectors_of(engine, embed("a", *texts(8)))
    (cache,) = [each for each in engine.caches.stats() if each.name == "vector"]
    assert cache.size_bytes == 3 * size
    assert cache.evictions == 5
    other = structs.replace(embed("b", *texts(8)[7:]), cache_salt="another key")
    vectors_of(engine, other)
    assert engine.ends["b"].usage.cached_tokens == 0
    vectors_of(engine, embed("c", *texts(8)[6:7]))
    assert engine.ends["c"].usage.cached_tokens > 0


def test_input_types_are_prompts_of_checkpoint(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("qwen3_embedding"))
    prefix = engine.loaded.spec.vectors.prompts["query"]
    plain = vectors_of(engine, embed("plain", (prefix + "What?",), ("What?",)))
    typed = vectors_of(engine, embed("typed", ("What?",), pooling=Pooling(input_type="query")))
    document = vectors_of(engine, embed("d", ("What?",), pooling=Pooling(input_type="document")))
    own = vectors_of(engine, embed("own", ("What?",), pooling=Pooling(instruction=prefix)))
    np.testing.assert_allclose(typed[0], plain[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own[0], plain[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(document[0], plain[1], rtol=1e-4, atol=1e-5)
    end = engine.failure(embed("unknown", ("What?",), pooling=Pooling(input_type="poem")))
    assert end.param == "input_type"
    assert "title" in end.message


def test_prompts_of_pages_and_queries_are_colpalis(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("colqwen2_5"))
    query = Pooling(input_type="query")
    vectors_of(engine, embed("page", (random_image(1),), ("plain",)))
    vectors_of(engine, embed("query", ("Which?",), pooling=query))
    decode = engine.loaded.spec.tokenizer.decode
    page, plain, asked = (
        decode(engine.prompts[name].token_ids) for name in ("page/0", "page/1", "query/0")
    )
    assert page.startswith("<|im_start|>user\n<|vision_start|><|image_pad|>")
    assert page.endswith("<|vision_end|>Describe the image.<|im_end|><|endoftext|>")
    assert plain == "plain"
    assert asked == "Query: Which?" + "<|endoftext|>" * 10


def test_control_tokens_in_texts_stay_text(load_tiny: Load) -> None:
    engine = EngineHarness(*load_tiny("qwen3_vl_embedding"))
    rows = vectors_of(engine, embed("a", ("<|im_end|>",), ("x<|image_pad|>",)))
    assert all(np.isfinite(each).all() for each in rows)
    special = engine.loaded.spec.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (engine.prompts["a/0"].token_ids == special).sum() == 2  # the turns' own
    assert engine.loaded.spec.image_token_id not in engine.prompts["a/1"].token_ids


def test_cut_vectors_are_of_length_one(engine: EngineHarness) -> None:
    engine.add(embed("cut", *texts(3), pooling=Pooling(dimensions=5)))
    engine.run()
    for each in finished(engine, "cut").vectors:
        assert rows_of(each).shape == (1, 5)
        np.testing.assert_allclose(np.linalg.norm(rows_of(each)), 1.0, rtol=1e-6)
    end = engine.failure(embed("more", ("x",), pooling=Pooling(dimensions=65)))
    assert end.param == "dimensions"
