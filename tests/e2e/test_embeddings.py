"""Vectors and rankings of a real daemon, by OpenAI's client and over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from tests.support.daemons import Daemon, checkpoint, running_daemon, with_settings
from tests.support.images import image_part, noise, user

pytestmark = pytest.mark.e2e

TEXTS = ["a red circle", "an invoice of May", "a long text about nothing " * 20]
IMAGE = noise(41, (96, 64))
PART = image_part(IMAGE)
URL: str = PART["image_url"]["url"]


def post(daemon: Daemon, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{daemon.url}{route}", json=body, timeout=60)


def vectors(daemon: Daemon, **body: Any) -> list[list[float]]:
    answer = post(daemon, "/v1/embeddings", **body)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def test_openai_client_gets_vectors_in_order(embedding_daemon: Daemon) -> None:
    client = embedding_daemon.client()
    answer = client.embeddings.create(model="default", input=TEXTS)
    assert [each.index for each in answer.data] == [0, 1, 2]
    as_floats = client.embeddings.create(model="default", input=TEXTS, encoding_format="float")
    for one, other in zip(answer.data, as_floats.data, strict=True):
        assert np.array_equal(np.float32(one.embedding), np.float32(other.embedding))
        assert np.isclose(np.linalg.norm(one.embedding), 1.0, rtol=1e-5)
    assert as_floats.usage.prompt_tokens == answer.usage.total_tokens
    cached = as_floats.usage.model_extra or {}
    assert cached["prompt_tokens_details"]["cached_tokens"] == answer.usage.prompt_tokens
    cut = client.embeddings.create(model="default", input=TEXTS[0], dimensions=16)
    first = np.float32(answer.data[0].embedding)[:16]
    assert np.allclose(cut.data[0].embedding, first / np.linalg.norm(first), rtol=1e-5)
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="default", input=TEXTS[0], dimensions=4096)
    assert refused.value.param == "dimensions"


def test_token_ids_are_embedded_as_given(embedding_daemon: Daemon) -> None:
    client = embedding_daemon.client()
    one = client.embeddings.create(model="default", input=[5, 6, 7])
    both = client.embeddings.create(model="default", input=[[8, 9], [5, 6, 7]])
    assert one.usage.prompt_tokens == 3
    assert both.usage.prompt_tokens == 5
    assert both.data[1].embedding == one.data[0].embedding
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="default", input=[[5], [100_000]])
    assert refused.value.param == "input[1]"


def test_all_forms_of_pictures_give_one_vector(embedding_daemon: Daemon) -> None:
    inputs = [URL, [PART], {"content": [PART]}, {"image": URL}, {"image": URL.partition(",")[2]}]
    rows = vectors(embedding_daemon, input=inputs)
    rows += vectors(embedding_daemon, messages=[user(IMAGE)])
    assert all(row == rows[0] for row in rows)
    with_text = vectors(embedding_daemon, input=[[PART, {"type": "text", "text": "a picture"}]])
    assert with_text[0] != rows[0]


def test_ranking_is_sorted_and_as_vectors_say(embedding_daemon: Daemon) -> None:
    documents = ["one", {"image": URL}, "two", "three"]
    query = np.array(vectors(embedding_daemon, input="two", input_type="query")[0])
    rows = np.array(vectors(embedding_daemon, input=documents, input_type="document"))
    for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = post(embedding_daemon, route, query="two", documents=documents, top_n=3)
        results = answer.json()["results"]
        scores = [each["relevance_score"] for each in results]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == 3
        expected = [float(rows[each["index"]] @ query) for each in results]
        assert np.allclose(scores, expected, rtol=1e-4, atol=1e-5)
        assert "document" not in results[0]
    body = {"query": "two", "documents": documents, "return_documents": True}
    results = post(embedding_daemon, "/v1/rerank", **body).json()["results"]
    shown = {each["index"]: each["document"] for each in results}
    assert shown == {
        0: {"text": "one"},
        1: {"image": URL},
        2: {"text": "two"},
        3: {"text": "three"},
    }


def test_model_list_names_vectors_as_output(embedding_daemon: Daemon) -> None:
    (model,) = embedding_daemon.get("/v1/models")[1]["data"]
    assert model["modalities"] == {"input": ["text", "image", "video"], "output": ["embeddings"]}
    assert model["capabilities"] == ["embedding", "rerank", "vision", "video"]
    assert model["dimensions"] == 64
    assert embedding_daemon.get("/api/v0/models")[1]["data"][0]["type"] == "embeddings"
    answer = post(embedding_daemon, "/v1/chat/completions", messages=[user("hi")])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "model"
    assert "qwen3_vl_embedding" in error["message"]


def test_client_that_leaves_ends_all_inputs(embedding_daemon: Daemon) -> None:
    many = [f"{number} " * 100 for number in range(400)]
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{embedding_daemon.url}/v1/embeddings", json={"input": many}, timeout=0.7)
    embedding_daemon.wait_idle()
    assert embedding_daemon.num_in_flight() == 0
    assert vectors(embedding_daemon, input="still here")


def test_short_input_does_not_wait_for_many_long_ones(embedding_daemon: Daemon) -> None:
    many = [f"{number} " * 60 for number in range(600)]  # more than one group
    done: list[float] = []

    def embed_many() -> None:
        vectors(embedding_daemon, input=many)
        done.append(time.monotonic())

    worker = threading.Thread(target=embed_many)
    worker.start()
    try:
        while not embedding_daemon.num_in_flight():
            time.sleep(0.01)
        vectors(embedding_daemon, input="a short text")
        answered_at = time.monotonic()
    finally:
        worker.join()
    assert answered_at < done[0]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a model that answers, and one that makes vectors."""
    folder = tmp_path_factory.mktemp("both")
    settings = folder / "settings.toml"
    settings.write_text(
        f'[model]\npath = "{checkpoint("qwen3_vl")}"\nname = "chat"\n'
        f'[models.embed]\npath = "{checkpoint("qwen3_embedding")}"\n'
    )
    with running_daemon(folder, "--config", str(settings)) as running:
        yield running


def test_models_of_both_kinds_refuse_each_others_requests(both: Daemon) -> None:
    assert len(vectors(both, model="embed", input=TEXTS)) == 3
    wrong = post(both, "/v1/embeddings", model="chat", input="text")
    assert wrong.status_code == 400
    assert "makes no vectors" in wrong.json()["error"]["message"]
    wrong = post(both, "/v1/chat/completions", model="embed", messages=[user("hi")])
    assert wrong.status_code == 400
    picture = post(both, "/v1/embeddings", model="embed", input=URL)
    assert picture.status_code == 400
    assert "reads text alone" in picture.json()["error"]["message"]


def test_stream_goes_on_while_another_model_embeds(both: Daemon) -> None:
    client = both.client()
    expected = client.chat.completions.create(
        model="chat", messages=[user("Tell")], max_tokens=150, temperature=0
    )
    stream = client.chat.completions.create(
        model="chat", messages=[user("Tell")], max_tokens=150, temperature=0, stream=True
    )
    text = next(stream).choices[0].delta.content or ""
    assert len(vectors(both, model="embed", input=[f"{i} {TEXTS[2]}" for i in range(50)])) == 50
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == expected.choices[0].message.content


def test_tokens_beyond_limit_of_inputs_are_refused(tmp_path: Any) -> None:
    settings = with_settings("limits.max_inputs=2", "model.name=model")
    model = ("--model", str(checkpoint("bert")), *settings)
    with running_daemon(tmp_path, *model) as daemon:
        assert len(vectors(daemon, input=["a", [5, 6]])) == 2
        answer = post(daemon, "/v1/embeddings", input=["a", "b", "c"])
        assert answer.status_code == 400
        assert "limits.max_inputs" in answer.json()["error"]["message"]
        large = json.dumps({"input": [list(range(5, 300))] * 2 * 200}).encode()
        refused = httpx.post(
            f"{daemon.url}/v1/embeddings",
            content=large,
            headers={"Content-Type": "application/json"},
            timeout=60,
        )
        assert refused.status_code == 400


def test_ollama_client_gets_same_vectors(embedding_daemon: Daemon) -> None:
    client = ollama.Client(embedding_daemon.url)
    inputs = [*TEXTS, URL]
    rows = vectors(embedding_daemon, input=inputs)
    answer = client.embed("default", inputs)
    assert [list(row) for row in answer.embeddings] == rows
    assert answer.prompt_eval_count
    one = client.embeddings("default", TEXTS[0]).embedding
    assert list(one) == rows[0]
    short = client.embed("default", TEXTS[0], dimensions=16).embeddings
    assert [list(row) for row in short] == vectors(embedding_daemon, input=TEXTS[0], dimensions=16)
    (model,) = [client.show("default")]
    assert model.capabilities == ["embedding", "vision"]
