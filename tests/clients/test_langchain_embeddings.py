"""LangChain's `OpenAIEmbeddings`, and its vector store, with a model that makes vectors."""

from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from tests.support.daemons import Daemon

TEXTS = ["a red circle", "an invoice of May", "notes on bread"]


@pytest.fixture
def embeddings(embedding_daemon: Daemon) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model="default",
        base_url=f"{embedding_daemon.url}/v1",
        api_key=SecretStr("none"),
        check_embedding_ctx_length=False,
        max_retries=0,
    )


def test_langchain_embeds_documents_and_queries_alike(embeddings: OpenAIEmbeddings) -> None:
    rows = embeddings.embed_documents(TEXTS)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-5)
    assert embeddings.embed_query(TEXTS[1]) == rows[1]
    assert asyncio.run(embeddings.aembed_documents(TEXTS)) == rows


def test_langchain_store_finds_documents(embeddings: OpenAIEmbeddings) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    (found,) = store.similarity_search(TEXTS[2], k=1)
    assert found.page_content == TEXTS[2]


def test_langchain_asks_for_fewer_dimensions(embeddings: OpenAIEmbeddings) -> None:
    cut = embeddings.model_copy(update={"dimensions": 8})
    assert len(cut.embed_query("text")) == 8
    with pytest.raises(openai.BadRequestError, match="64 dimensions"):
        embeddings.model_copy(update={"dimensions": 512}).embed_query("text")
