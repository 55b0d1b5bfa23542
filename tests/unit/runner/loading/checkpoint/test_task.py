"""A checkpoint's files say whether it makes vectors, scores or answers."""

from __future__ import annotations

import pytest

from vlm_server.errors import ModelLoadError
from vlm_server.runner.families.table import FAMILIES
from vlm_server.runner.loading.checkpoint.task import with_task

PLAIN = ("config.json", "model.safetensors", "tokenizer.json")
SENTENCES = (*PLAIN, "modules.json", "1_Pooling")
CLASSIFIER = "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("model_type", "names", "task", "family"),
    [
        ("qwen3", PLAIN, "auto", "qwen3"),
        ("qwen3", SENTENCES, "auto", "qwen3_embedding"),
        ("qwen3", (*PLAIN, "1_Pooling"), "auto", "qwen3_embedding"),
        ("qwen3", SENTENCES, "generate", "qwen3"),
        ("qwen3", PLAIN, "embed", "qwen3_embedding"),
        ("qwen3_vl", PLAIN, "auto", "qwen3_vl"),
        ("qwen3_vl", PLAIN, "embed", "qwen3_vl_embedding"),
        ("qwen3_vl_embedding", PLAIN, "auto", "qwen3_vl_embedding"),
        ("gemma3_text", SENTENCES, "auto", "gemma3_embedding"),
        ("lfm2", SENTENCES, "auto", "lfm2_embedding"),
        ("lfm2", (*SENTENCES, "1_Dense"), "auto", "lfm2_colbert"),
        ("lfm2", PLAIN, "auto", "lfm2"),
        ("xlm-roberta", PLAIN, "auto", "xlm_roberta"),
        ("bert", PLAIN, "auto", "bert"),
    ],
)
def test_files_and_setting_decide_family(
    model_type: str, names: tuple[str, ...], task: str, family: str
) -> None:
    assert with_task({"model_type": model_type}, names, task)["model_type"] == family
    assert family in FAMILIES


def test_classifiers_are_known_by_architecture() -> None:
    config = {"model_type": "bert", "architectures": [CLASSIFIER]}
    assert with_task(config, PLAIN, "auto")["model_type"] == "bert_reranker"
    roberta = {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForSequenceClassification"],
    }
    assert with_task(roberta, PLAIN, "auto")["model_type"] == "xlm_roberta_reranker"


@pytest.mark.parametrize(
    ("model_type", "names", "task"),
    [
        ("llama", SENTENCES, "auto"),
        ("qwen2_vl", PLAIN, "embed"),
        ("qwen3_vl_embedding", PLAIN, "generate"),
    ],
)
def test_tasks_that_mlx_vlm_can_not_do_are_refused(
    model_type: str, names: tuple[str, ...], task: str
) -> None:
    with pytest.raises(ModelLoadError, match=r"vectors"):
        with_task({"model_type": model_type}, names, task)
